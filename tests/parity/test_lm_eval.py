"""lm-evaluation-harness under posbench: its own numbers where the method is neutral, the method's own
elsewhere."""

import json
import logging
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import posbench
from posbench.cli.harness import PosbenchLM, configured
from posbench.cli.main import main
from posbench.methods import ScaleChannel
from posbench.tasks.kv_retrieval import WORDS
from posbench.versions import install_hint
from tests.messages import assert_refused, refused
from tests.rounding import assert_same, embedded_noise, log_probabilities

NEUTRAL = {"method": "scale_channel", "factor": 1.0}
HALF = {"method": "scale_channel", "channel": 15, "factor": 0.5, "layers": "1:3"}
METHOD = ScaleChannel(channel=15, factor=0.5, layers=(1, 3))


def prompt(number: int, pairs: int) -> str:
    """A prompt in the words of the embedded model that asks for a pair in the middle."""
    words = [WORDS[(7 * number + 5 * k) % len(WORDS)] for k in range(2 * pairs)]
    body = '", "'.join(
        f'{a}": "{b}' for a, b in zip(words[::2], words[1::2], strict=True)
    )
    return f'Json data: {{"{body}"}} The value of key "{words[pairs - pairs % 2]}" is "'


CONTEXTS = [prompt(number, pairs) for number, pairs in enumerate([3, 9, 5, 16, 2, 7])]
# One token, two, and many; the first two share what follows the context.
CHOICES = ['bal"', 'kop"', "tip", 'gel", "mop": "nap"']
LONGEST = 5
"""Tokens of the longest choice, each with its rounding."""


@pytest.fixture(scope="module", autouse=True)
def quiet_and_quick() -> Iterator[None]:
    """Without the harness's warnings, and without the report on the machine that each evaluation writes."""
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def stock() -> HFLM:
    lm = posbench.load("tiny", device="cpu")
    return HFLM(lm.model, tokenizer=lm.tokenizer, batch_size=1)


def ours(batch_size: int | str = 1, **settings: Any) -> PosbenchLM:
    return PosbenchLM("tiny", device="cpu", batch_size=batch_size, **settings)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i)
        for i, a in enumerate(arguments)
    ]


def pairs() -> list[Instance]:
    return asked(
        "loglikelihood",
        *((context, choice) for choice in CHOICES for context in CONTEXTS),
    )


def generations(*, until: str = '"', most: int = 6) -> list[Instance]:
    return asked(
        "generate_until",
        *(
            (c, {"until": [until], "max_gen_toks": most, "do_sample": False})
            for c in CONTEXTS
        ),
    )


def assert_scores(
    found: list[tuple[float, bool]], expected: list[tuple[float, bool]]
) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    noise = LONGEST * embedded_noise("tiny", log_probabilities)
    assert_same(
        [nats for nats, _ in found], [nats for nats, _ in expected], noise, "losses"
    )


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Two local tasks of the harness, read without network: four choices, and a generated answer."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"text": c, "choices": [w + '"' for w in WORDS[i : i + 4]], "gold": i % 4}
        for i, c in enumerate(CONTEXTS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choice = {
        "task": "pb_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
        ],
    }
    answer = {
        "task": "pb_answer",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ['"'], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "bypass"}],
    }
    for task in (choice, answer):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))
    return TaskManager(include_path=str(folder), include_defaults=False)


def results(
    model: Any, tasks: TaskManager, **settings: Any
) -> tuple[float, list[Any], list[Any]]:
    """Accuracy, and every answer of both tasks."""
    out = simple_evaluate(
        model=model,
        tasks=["pb_choice", "pb_answer"],
        task_manager=tasks,
        bootstrap_iters=0,
        **settings,
    )
    samples = [
        [sample["filtered_resps"] for sample in out["samples"][name]]
        for name in ("pb_choice", "pb_answer")
    ]
    return out["results"]["pb_choice"]["acc,none"], samples[0], samples[1]


def test_whole_tasks_give_the_harness_s_own_numbers(stock: HFLM, tasks: TaskManager):
    accuracy, scores, texts = results(stock, tasks)
    assert any(text[0] for text in texts)
    for batch_size in (1, 4):
        args = "pretrained=tiny,method=scale_channel,channel=15,factor=1,layers=1:3,device=cpu"
        found = results("posbench", tasks, model_args=args, batch_size=batch_size)
        assert found[0] == accuracy
        assert found[2] == texts
        for row, expected in zip(found[1], scores, strict=True):
            assert_scores(row, expected)


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [
        ({"method": "none"}, 1),
        ({"method": "none"}, 4),
        (NEUTRAL, 1),
        (NEUTRAL, 4),
        (NEUTRAL, "auto"),
    ],
)
def test_a_neutral_method_scores_as_the_harness_does(
    stock: HFLM, settings: dict[str, Any], batch_size: int | str
):
    model = ours(batch_size, max_batch_size=2, max_length=128, **settings)
    assert_scores(
        model.loglikelihood(pairs(), disable_tqdm=True),
        stock.loglikelihood(pairs(), disable_tqdm=True),
    )
    assert model.generate_until(
        generations(), disable_tqdm=True
    ) == stock.generate_until(generations(), disable_tqdm=True)


def test_prompts_over_max_length_lose_their_beginning_as_in_the_harness():
    lm = posbench.load("tiny", device="cpu")
    expected = HFLM(lm.model, tokenizer=lm.tokenizer, max_length=20).loglikelihood(
        pairs(), disable_tqdm=True
    )
    full = ours(4).loglikelihood(pairs(), disable_tqdm=True)
    found = ours(4, max_length=20, **NEUTRAL).loglikelihood(pairs(), disable_tqdm=True)
    assert_scores(found, expected)
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, full, strict=True)) > 0.1


def test_a_text_without_context_follows_the_prefix_token(stock: HFLM):
    requests = asked("loglikelihood", ("", "bal"), ("", 'Json data: {"bal": "kop'))
    assert_scores(
        ours(4, **NEUTRAL).loglikelihood(requests), stock.loglikelihood(requests)
    )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_scores_under_the_method_are_those_of_one_prompt_at_a_time(
    stock: HFLM, batch_size: int
):
    """Teacher-forced, token by token on the cache, through stock calls inside the plain method block."""
    model = ours(batch_size, **HALF)
    lm = posbench.load("tiny", device="cpu")
    found = model.loglikelihood(pairs(), disable_tqdm=True)
    expected = []
    with METHOD.applied(lm), torch.inference_mode():
        for context, choice in (request.args for request in pairs()):
            tokens = lm.tokenizer(choice)["input_ids"]
            out = lm.model(
                torch.tensor([lm.tokenizer(context)["input_ids"]]), use_cache=True
            )
            nats = 0.0
            greedy = True
            for token in tokens:
                row = F.log_softmax(out.logits[0, -1].double(), dim=-1)
                nats = nats + float(row[token])
                greedy = greedy and int(row.argmax()) == token
                out = lm.model(
                    torch.tensor([[token]]), past_key_values=out.past_key_values
                )
            expected.append((nats, greedy))
    assert_scores(found, expected)
    neutral = stock.loglikelihood(pairs(), disable_tqdm=True)
    assert max(abs(a - b) for (a, _), (b, _) in zip(found, neutral, strict=True)) > 0.01


def test_scores_under_the_method_are_those_of_answer_loss():
    found = ours(4, **HALF).loglikelihood(pairs(), disable_tqdm=True)
    lm = posbench.load("tiny", device="cpu")
    for (nats, _), request in zip(found, pairs(), strict=True):
        context, choice = request.args
        with METHOD.applied(lm):
            loss = float(lm.answer_loss([context], [choice])[0])
        noise = LONGEST * embedded_noise("tiny", log_probabilities)
        assert_same(
            nats, -loss * len(lm.tokenizer(choice)["input_ids"]), noise, "losses"
        )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generations_under_the_method_are_its_own(stock: HFLM, batch_size: int):
    settings = {
        "method": "scale_channel",
        "channel": 15,
        "factor": -8.0,
        "layers": [0, 3],
    }
    found = ours(batch_size, **settings).generate_until(
        generations(until="kop"), disable_tqdm=True
    )
    lm = posbench.load("tiny", device="cpu")
    with ScaleChannel(channel=15, factor=-8.0, layers=(0, 3)).applied(lm):
        expected = [
            lm.generate([c], max_new_tokens=6, stop=["kop"])[0] for c in CONTEXTS
        ]
    assert found == expected
    assert found != stock.generate_until(generations(until="kop"), disable_tqdm=True)


@pytest.mark.parametrize(("cached", "prefills"), [(True, 6), (False, 24)])
def test_a_context_runs_once_for_all_its_continuations(cached: bool, prefills: int):
    model = ours(1, method="none", logits_cache=cached)
    forward = model.lm.model.forward
    lengths = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None:
            lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    model.lm.model.forward = counted
    model.loglikelihood(pairs(), disable_tqdm=True)
    assert len(lengths) == prefills


def test_the_model_is_itself_between_calls():
    model = ours(4, **HALF)
    before = vars(model.lm.model).copy()
    model.loglikelihood(pairs()[:2], disable_tqdm=True)
    model.generate_until(generations()[:2], disable_tqdm=True)
    assert vars(model.lm.model) == before


def test_whole_texts_are_scored_where_all_tokens_are_treated_alike():
    texts = asked("loglikelihood_rolling", *((context,) for context in CONTEXTS))
    found = ours(4, method="none", max_length=16).loglikelihood_rolling(
        texts, disable_tqdm=True
    )
    lm = posbench.load("tiny", device="cpu")
    expected = HFLM(
        lm.model, tokenizer=lm.tokenizer, max_length=16
    ).loglikelihood_rolling(texts, disable_tqdm=True)
    noise = embedded_noise("tiny", log_probabilities)
    tokens = [len(lm.tokenizer(context)["input_ids"]) for context in CONTEXTS]
    assert_same(found, expected, max(tokens) * noise, "losses")
    everywhere = ours(4, **HALF, last="all").loglikelihood_rolling(
        texts, disable_tqdm=True
    )
    with ScaleChannel(channel=15, factor=0.5, layers=(1, 3), last="all").applied(lm):
        for nats, context, count in zip(everywhere, CONTEXTS, tokens, strict=True):
            ids = torch.tensor(
                [[lm.tokenizer.eos_token_id, *lm.tokenizer(context)["input_ids"]]]
            )
            loss = F.cross_entropy(
                lm.logits(ids[:, :-1])[0], ids[0, 1:], reduction="sum"
            )
            assert_same(nats, -loss, count * noise, "losses")
    with refused(
        "method",
        "scale_channel",
        allowed="log-likelihoods",
        hint=("loglikelihood_rolling", "last=all"),
    ):
        ours(4, **HALF).loglikelihood_rolling(texts)


def test_a_cache_answers_its_own_method_alone(tmp_path: Path):
    file = str(tmp_path / "answers.db")
    half = ours(4, **HALF)
    scores = CachingLM(half, file).loglikelihood(pairs())
    texts = CachingLM(half, file).generate_until(generations())
    # A smaller batch may go on with the file, and computes nothing again; another factor may not.
    again = ours(1, **HALF)
    again.lm.model.forward = None
    assert CachingLM(again, file).loglikelihood(pairs()) == scores
    assert CachingLM(again, file).generate_until(generations()) == texts
    with refused("--use_cache", str(file), allowed="new file", hint="file"):
        CachingLM(ours(4, **NEUTRAL), file)


def test_a_cache_of_another_model_type_is_refused(stock: HFLM, tmp_path: Path):
    file = str(tmp_path / "answers.db")
    CachingLM(stock, file).loglikelihood(pairs()[:1])
    stock.set_cache_hook(CacheHook(None))
    with refused("--use_cache", str(file), allowed="new file", hint="file"):
        CachingLM(ours(1), file)


def test_constants_come_from_the_model_s_file_or_from_the_user(tmp_path: Path):
    assert configured("tiny", "scale_channel", {}).choice.build() == ScaleChannel(
        channel=15, factor=-1.0, layers=(1, 3)
    )
    given = configured(
        "tiny",
        "scale_channel",
        {"channel": "15:20", "layers": [0, 2], "last": 2, "dtype": "float64"},
    )
    assert given.choice.build() == ScaleChannel(
        channel=(15, 20), factor=-1.0, layers=(0, 2), last=2
    )
    assert given.model.dtype == "float64"
    own = yaml.safe_load(
        (posbench.model.load.paths.CONF / "model" / "tiny.yaml").read_text()
    ) | {"name": "mine"}
    own["scale_channel"]["factor"] = 0.25
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(yaml.safe_dump(own))
    assert (
        configured("mine", "scale_channel", {}, str(tmp_path)).choice.build().factor
        == 0.25
    )


def test_several_methods_are_joined_by_plus_signs():
    arguments = "pretrained=tiny,method=layer_scaling+scale_channel,"
    arguments += "parts.scale_channel.layers=0:2,parts.scale_channel.factor=-8"
    model = PosbenchLM.create_from_arg_string(arguments)
    lm = posbench.load("tiny", device="cpu")
    parts = model.method.parts
    assert list(parts) == ["layer_scaling", "scale_channel"] and parts[
        "scale_channel"
    ].layers == (0, 2)
    found = model.generate_until(generations(until="kop"), disable_tqdm=True)
    with (
        parts["layer_scaling"].applied(lm),
        ScaleChannel(channel=15, factor=-8.0, layers=(0, 2)).applied(lm),
    ):
        expected = [
            lm.generate([c], max_new_tokens=6, stop=["kop"])[0] for c in CONTEXTS
        ]
    assert found == expected
    assert found != ours(2, method="layer_scaling").generate_until(
        generations(until="kop"), disable_tqdm=True
    )


def test_a_directory_is_a_model(checkpoint: Path):
    model = PosbenchLM.create_from_arg_string(
        f"pretrained={checkpoint},method=scale_channel,channel=3,factor=0.5,layers=1:2,dtype=float64,batch_size=2",
        {"batch_size": 1, "device": "cuda:0", "max_batch_size": None},
    )
    assert model.batch_size == 2
    assert model.max_length == 256
    assert model.lm.model.dtype == torch.float64
    assert model.method == ScaleChannel(channel=3, factor=0.5, layers=(1, 2))
    assert model.get_model_info()["posbench"]["factor"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("method=scale_channel", "model_args.pretrained"),
        ("pretrained=tiny,method=scale_chanel", "method"),
        ("pretrained=tiny,method=layer_scaling+scale_chanel", "method"),
        (
            "pretrained=tiny,method=layer_scaling+scale_channel,layers=0:2",
            "model_args.layers",
        ),
        ("pretrained=tiny,method=scale_channel,chanel=3", "model_args.chanel"),
        ("pretrained=tiny,channel=3", "model_args.channel"),
        ("pretrained=tiny,method=scale_channel,channel=48", "method.channel"),
        ("pretrained=tiny,method=scale_channel,layers=3", "model_args.layers"),
        ("pretrained=tiny,method=scale_channel,factor=big", "model_args.factor"),
        ("pretrained=tiny,dtype=float8", "model.dtype"),
        ("pretrained=tiny,batch_size=0", "model_args.batch_size"),
        ("pretrained=tiny,max_length=0", "model_args.max_length"),
        ("pretrained=no/such_dir_or_model", "model_args.pretrained"),
        ("pretrained=tiny,config_dir=/no/such/dir", "model_args.config_dir"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: str,
    field: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    # Reading the harness's own list of tasks takes seconds, and the model comes first.
    monkeypatch.setattr(
        "lm_eval.config.evaluate_config.EvaluatorConfig.process_tasks",
        lambda self, metadata: None,
    )
    flags = ["--model", "posbench", "--model_args", arguments, "--tasks", "none"]
    assert main(["lm_eval", *flags]) == 2
    err = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("posbench: ")
    ]
    assert len(err) == 1
    assert err[0].startswith(f"posbench: {field} = ")


def test_unknown_names_are_refused_as_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Without the harness's own tasks, which take seconds to read.
    bare = partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", bare)
    flags = ["--model", "posbench", "--model_args", "pretrained=tiny"]
    assert main(["lm_eval", *flags, "--tasks", "nope,neither"]) == 2
    told = capsys.readouterr().err.splitlines()
    lines = [line for line in told if line.startswith("posbench: ")]
    assert len(lines) == 1
    assert_refused(lines[0], "--tasks", "nope, neither", hint="lm_eval ls tasks")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    field = "model_args.pretrained"
    for name, hint in (("tinny", "tiny"), ("owner/unlike", f"{field}=DIR")):
        with refused(field, name, allowed=("posbench ls models", "hub id"), hint=hint):
            PosbenchLM(name, device="cpu")


def test_a_task_whose_choice_is_empty_is_one_line():
    with refused("continuation", "0 tokens", allowed=("1", "512"), hint="choices"):
        ours(1).loglikelihood(asked("loglikelihood", (CONTEXTS[0], "")))


def test_without_the_harness_the_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert main(["lm_eval", "--tasks", "pb_choice"]) == 2
    assert install_hint("lm_eval") in capsys.readouterr().err


def test_generation_without_numbers_is_refused() -> None:
    lm = PosbenchLM("tiny", device="cpu")
    with torch.no_grad():
        lm.lm.model.model.layers[2].mlp.down_proj.weight.fill_(float("nan"))
    asked = Instance(
        "generate_until", {}, (CONTEXTS[0], {"until": ["x"], "max_gen_toks": 2}), 0
    )
    with refused("model", "tiny", allowed=("layer 2", "NaN"), hint="unmodified"):
        lm.generate_until([asked], disable_tqdm=True)


@pytest.mark.parametrize(("most", "num_cut"), [(1, len(CONTEXTS)), (6, 0)])
def test_replies_cut_at_max_gen_toks_are_counted(
    most: int, num_cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The embedded model says a word, a quotation mark and its end token."""
    requests = generations(until="never said", most=most)
    model = ours(4, method="none")
    logging.disable(logging.NOTSET)
    model.generate_until(requests, disable_tqdm=True)
    logging.disable(logging.WARNING)
    expected = f"{num_cut} of {len(CONTEXTS)} replies"
    assert (expected in caplog.text) == (num_cut > 0)
    assert ("max_gen_toks" in caplog.text) == (num_cut > 0)
