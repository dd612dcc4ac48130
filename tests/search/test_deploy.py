"""Search for what will be shipped: weights scaled by hand, plain loops, and searches that are killed."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
import yaml

import posbench as package
from posbench.export import base as export
from posbench.methods import ScaleChannel
from posbench.model.lm import LM
from posbench.report.folder import read_csv
from posbench.search import deploy
from tests.conftest import Result, config_of, run_folders
from tests.messages import assert_refused
from tests.rounding import assert_same, log_probabilities, random_noise

FACTORS = (-6.0, 6.0)
WIDTH = 8
SMALL = [
    "search=exhaustive",
    f"search.factors=[{FACTORS[0]},{FACTORS[1]}]",
    "search.layers=[0,1]",
]
SMALL += [
    "search.strings=4",
    "search.length=24",
    "search.window=3",
    "search.skip=1",
    "search.alphabet=tokens",
]
SMALL += [
    "task.prompt=compact",
    "task.records=words",
    "task.pairs=3",
    "task.limit=1",
    "task.positions=[0]",
]
SMALL += [
    "task.calibration_pairs=3",
    "task.calibration_examples=6",
    "runtime.device=cpu",
    "runtime.threads=1",
]
SMALL += [
    "method=scale_channel",
    "model=hf",
    "model.dtype=float32",
    "stages=[search]",
    "search.held_back=2",
]


def words(result: Result) -> str:
    return " ".join(result.out.split())


@cache
def random_model(seed: int, folder: Path) -> Path:
    """A random Llama of 2 layers and 8 channels that reads letters, one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(["</s>", *letters])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    window = {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.6, **sizes, **window
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "choices.jsonl"
    rows = [
        {"question": f"Which is {n}?", "choices": ["one", "two", "ten"], "gold": n % 3}
        for n in range(5)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    folder = tmp_path_factory.mktemp("random")
    return lambda seed: random_model(seed, folder / str(seed))


def by_hand(
    lm: LM, pairs: list[tuple[str, str]], channel: int = 0, factor: float = 1.0
) -> np.ndarray:
    """Loss of each answer, by one pass over prompt and answer of a model with scaled weights."""
    model = copy.deepcopy(lm.model)
    out = []
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight[:, channel] *= factor
        for prompt, answer in pairs:
            ids, right = (lm.tokenizer(text)["input_ids"] for text in (prompt, answer))
            nats = -model(torch.tensor([ids + right])).logits[0].log_softmax(-1)
            out.append(
                float(
                    sum(nats[len(ids) - 1 + i, token] for i, token in enumerate(right))
                )
                / len(right)
            )
    return np.array(out)


def letters(questions: Path) -> list[tuple[str, str]]:
    """The prompts of the questions, and the letters that should follow them."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    return [
        (f"{r['question']}\nA. one\nB. two\nC. ten\nAnswer:", f" {'ABC'[r['gold']]}")
        for r in rows
    ]


@cache
def plain(path: Path, questions: Path) -> tuple[dict[Any, Any], ...]:
    """Per candidate, None for the unmodified model: losses with the last token alone, with scaled weights,
    and those of the right letters with scaled weights."""
    lm = package.load(path, dtype="float32")
    task: Any = config_of(*SMALL, f"model.path={path}").task
    pairs = [(e.prompt, e.answers[0]) for e in task.examples("calibration")]
    last = dict[Any, Any]()
    every = dict[Any, Any]()
    side = dict[Any, Any]()
    for tried in [None, *product(range(WIDTH), FACTORS)]:
        channel, factor = tried or (0, 1.0)
        with ScaleChannel(channel=channel, factor=factor, layers=(0, 1)).applied(lm):
            last[tried] = np.array(
                [lm.answer_loss([prompt], [answer]).item() for prompt, answer in pairs]
            )
        every[tried], side[tried] = (
            by_hand(lm, each, channel, factor) for each in (pairs, letters(questions))
        )
    return last, every, side


# Of these models: nothing exceeds; the best exceeds; nothing is left; a short list.
@pytest.mark.parametrize(
    ("seed", "short", "limit"),
    [(0, 16, 9.0), (0, 16, 0.02), (0, 1, 0.02), (2, 5, 0.02)],
)
def test_what_is_shipped_is_the_best_of_a_plain_loop(
    seed: int,
    short: int,
    limit: float,
    models: Callable[[int], Path],
    questions: Path,
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    path = models(seed)
    last, every, side = plain(path, questions)
    order = sorted(
        (tried for tried in last if tried), key=lambda tried: last[tried].mean()
    )
    rise = {tried: (side[tried] - side[None]).mean() for tried in side}
    allowed = [tried for tried in (None, *order[:short]) if rise[tried] <= limit]
    won = min(allowed, key=lambda tried: every[tried].mean())
    assert (won is None) == (short == 1), "each case is what it is meant to be"

    call = [
        *SMALL,
        f"model.path={path}",
        "search.deploy=lora",
        f"search.shortlist={short}",
    ]
    call += [
        "search.side_task=own_data",
        f"search.side_task.path={questions}",
        f"search.side_rise={limit}",
    ]
    result = posbench(*call)
    assert result.status == 0, result.err
    (folder,) = run_folders(outputs)
    block = yaml.safe_load((folder / "found.yaml").read_text())["scale_channel"]
    assert (block["channel"], block["factor"]) == (won or (None, None)) and block[
        "last"
    ] == "all"
    noise = random_noise(package.load(path, dtype="float32").model, log_probabilities)
    assert_same(block["loss"], every[won].mean(), noise, "losses")

    table = pd.read_csv(folder / "deploy.csv").set_index("rank")
    assert (
        list(table.index) == list(range(short + 1))
        and (table["candidates"] == len(order)).all()
    )
    for rank, tried in enumerate([None, *order[:short]]):
        row = table.loc[rank]
        price = (every[tried] - last[order[0]]).mean()
        wanted = [last[tried].mean(), every[tried].mean(), price, rise[tried]]
        assert_same(
            row[["loss_last_1", "loss", "price", "side_rise"]], wanted, noise, "losses"
        )
        assert (row["allowed"], row["selected"]) == (tried in allowed, tried == won)
    # Never worse than the optimum of the last token alone, folded, unless that one exceeds the budget.
    if order[0] in allowed:
        assert block["loss"] <= table.loc[1, "loss"]
    facts = block["deploy"]
    gaps = every[won] - last[order[0]]
    half = (
        scipy.stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    )
    assert facts["price_ci_low"] < gaps.mean() < facts["price_ci_high"]
    assert 0.7 < (facts["price_ci_high"] - facts["price_ci_low"]) / (2 * half) < 2, (
        "near Student's"
    )
    assert_same(facts["loss_last_1"], last[order[0]].mean(), noise, "losses")
    assert (facts["tried"], facts["exceed"], facts["side_n"]) == (
        short,
        short + 1 - len(allowed),
        5,
    )
    for line in deploy.summary_lines(facts):
        assert line in words(result)
    assert ("nothing is left to ship" in words(result)) == (won is None)


def test_the_price_of_folding_is_that_of_the_last_token_whatever_is_typed(
    models: Callable[[int], Path],
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    call = [*SMALL, f"model.path={models(1)}", "search.deploy=lora", "stages=[search]"]
    tables = []
    for typed in ([], ["method.last=all"]):
        known = set(run_folders(outputs))
        result = posbench(*call, *typed)
        assert result.status == 0, result.err
        (folder,) = set(run_folders(outputs)) - known
        tables.append(pd.read_csv(folder / "deploy.csv"))
    pd.testing.assert_frame_equal(*tables)


def test_the_stages_that_follow_and_the_model_card_have_it(
    models: Callable[[int], Path],
    posbench: Callable[..., Result],
    outputs: Path,
    tmp_path: Path,
) -> None:
    call = [
        *SMALL,
        f"model.path={models(1)}",
        "search.deploy=checkpoint",
        "search.shortlist=2",
    ]
    assert posbench(*call, "stages=[search,evaluate]").status == 0
    (folder,) = run_folders(outputs)
    ran, found = (folder / name for name in ("method.json", "found.yaml"))
    facts = yaml.safe_load(found.read_text())["scale_channel"]["deploy"]
    assert json.loads(ran.read_text())["last"] == "all" and "side_task" not in facts
    config = config_of(*call)
    (section,) = config.search.shipped_sections(
        lambda name: read_csv(folder / f"{name}.csv")
    )
    assert (
        section.text.startswith("Price of folding for checkpoint: ")
        and len(section.rows) == 3
    )
    assert [row[-1] for row in section.rows].count("yes") == 1
    # Exactly what was found is written, with the price that the search measured.
    out = tmp_path / "fix"
    result = posbench(
        "export", str(folder), "--to", "lora", "--exact", "--out", str(out), verb=True
    )
    assert result.status == 0, result.err
    line = deploy.summary_sentences(facts)
    assert line in (out / "README.md").read_text() and line in words(result)


def test_a_budget_without_folding_and_an_own_mode(
    models: Callable[[int], Path],
    questions: Path,
    posbench: Callable[..., Result],
    outputs: Path,
) -> None:
    """``transformers`` holds what the paper does; what is typed of the method is asked as it will run."""
    last, _, side = plain(models(0), questions)
    call = [
        *SMALL,
        f"model.path={models(0)}",
        "search.shortlist=3",
        "search.deploy=transformers",
    ]
    call += [
        "search.side_task=own_data",
        f"search.side_task.path={questions}",
        "search.side_rise=0.05",
    ]
    assert posbench(*call).status == 0
    (folder,) = run_folders(outputs)
    table = pd.read_csv(folder / "deploy.csv").set_index("rank")
    assert (table["loss"] == table["loss_last_1"]).all()
    assert (
        "last"
        not in yaml.safe_load((folder / "found.yaml").read_text())["scale_channel"]
    )
    lm = package.load(models(0), dtype="float32")
    order = sorted(filter(None, last), key=lambda t: last[t].mean())
    channel, factor = order[0]
    pairs = [(lm.encode(p).ids, a) for p, a in letters(questions)]
    with ScaleChannel(channel=channel, factor=factor, layers=(0, 1)).applied(lm):
        said = [
            lm.continuations([ids], [[lm.tokenizer(a)["input_ids"]]])[0][0][0] / len(a)
            for ids, a in pairs
        ]
    assert table.loc[1, "side_loss"] == pytest.approx(-np.mean(said), abs=2e-5)
    assert table.loc[0, "side_loss"] == pytest.approx(side[None].mean(), abs=2e-5)


class Killed(BaseException):
    pass


def test_a_killed_one_goes_on_to_the_same_bytes(
    models: Callable[[int], Path],
    questions: Path,
    posbench: Callable[..., Result],
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = [
        *SMALL,
        f"model.path={models(0)}",
        "search.deploy=gguf-lora",
        "search.shortlist=3",
    ]
    call += [
        "search.side_task=own_data",
        f"search.side_task.path={questions}",
        "runtime.batch_size=3",
    ]
    names = "deploy.csv", "deploy.jsonl", "found.yaml", "search.csv", "held_back.csv"

    def kept() -> dict[str, bytes]:
        (folder,) = run_folders(outputs)
        return {name: (folder / name).read_bytes() for name in names}

    assert posbench(*call).status == 0
    wanted = kept()
    ask = LM.continuations
    shutil.rmtree(outputs)
    for _ in range(2):  # among the calibration prompts, then those of the side task
        left = [6]

        def dies(*args: Any, left: list[int] = left, **settings: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return ask(*args, **settings)

        monkeypatch.setattr(LM, "continuations", dies)
        with pytest.raises(Killed):
            posbench(*call)
    monkeypatch.setattr(LM, "continuations", ask)
    assert posbench(*call).status == 0
    assert kept() == wanted


def test_formats_that_fold_are_those_of_export() -> None:
    for name in export.FORMATS:
        form = export.find_format(name)
        assert form.folds == (name in deploy.FOLDING), name


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "search.deploy=lora method.last=1",
            "method.last = 1: allowed: all, with search.deploy=lora",
        ),
        (
            "search.deploy=lora method.tokens=last",
            "a method that folds into a lora; scale_channel with these",
        ),
        (
            "search.deploy=onnx",
            "allowed: checkpoint | lora | gguf | gguf-lora | transformers, or null",
        ),
        (
            "search.side_task=mmul",
            "search.side_task = 'mmul': allowed: ceval, kv_retrieval",
        ),
        ("search.side_task.limit=3", "next: choose one: search.side_task=mmlu"),
        (
            "search.side_task=own_data",
            "search.side_task.path = None: allowed: your file",
        ),
        (
            "search.side_task=kv_retrieval search.side_task.pairs=99",
            "search.side_task.pairs = 99",
        ),
    ],
)
def test_refusals(
    call: str, said: str, posbench: Callable[..., Result], outputs: Path
) -> None:
    result = posbench("model=tiny", "stages=[search]", *call.split())
    assert (
        result.status == 2
        and said in result.err
        and result.err.strip().count("\n") <= 1
    )
    assert not run_folders(outputs)


def test_a_side_task_that_the_model_cannot_read_is_refused(
    questions: Path, posbench: Callable[..., Result], outputs: Path
) -> None:
    call = [
        "model=tiny",
        "stages=[search]",
        "search.side_task=own_data",
        f"search.side_task.path={questions}",
    ]
    result = posbench(*call)
    assert result.status == 2
    assert_refused(result.err, "search.side_task", allowed=("tokenizer", "tiny"))


def test_validate_tells_what_it_takes(posbench: Callable[..., Result]) -> None:
    def asked(*more: str) -> dict[str, int]:
        said = posbench(
            "validate", "model=tiny", "stages=[search]", *more, verb=True
        ).out
        rows = re.findall(r"^(search(?:: \w+)?) +([\d,]+) ", said, re.M)
        return {name: int(count.replace(",", "")) for name, count in rows}

    side = ["search.side_task=kv_retrieval", "search.side_task.calibration_examples=7"]
    assert asked() == {"search": 3 * 120}
    assert asked("search.deploy=lora", *side) == {
        "search": (3 + 10) * 120,
        "search: kv_retrieval": 11 * 7,
    }
    shorter = asked(
        "search.deploy=transformers",
        "search.shortlist=2",
        "search.side_prompts=5",
        *side,
    )
    assert shorter == {"search": 3 * 120, "search: kv_retrieval": 3 * 5}
