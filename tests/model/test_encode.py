"""From an example to tokens: templates, the beginning of sequence, truncation, stop texts, choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_class
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import posbench
from posbench import paths
from posbench.errors import UserError
from posbench.methods import ScaleChannel, Unmodified
from posbench.model.hooks import fork
from posbench.model.lm import LM, batches
from posbench.schema import build
from posbench.tasks import KVRetrieval
from tests.cli import test_tasks
from tests.models import BUILDERS

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ bos_token + '[INST] ' + system + messages[0]['content'] + ' [/INST]' }}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>user\n' + messages[0]['content'] + '<end_of_turn>\n<start_of_turn>model\n' }}"
)


def characters(bos: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, so that lengths and cuts can be read off."""
    letters = sorted({chr(c) for c in range(32, 127)} | {"\n", "é"})
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tiny() -> LM:
    return posbench.load("tiny")


def reader(
    template: str | None = None, chat_template: str = "auto", bos: bool = True, window: int = 4096
) -> LM:
    """A random model behind the character tokenizer."""
    torch.manual_seed(0)
    tokenizer = characters(bos)
    tokenizer.chat_template = template
    lm = posbench.load(BUILDERS["llama"](), tokenizer=tokenizer)
    lm.chat_template, lm.context_window = chat_template, window
    return lm


@pytest.mark.parametrize(
    ("template", "name", "system", "wanted"),
    [
        (None, "auto", "", "Why?A:"),
        (None, "auto", "Be brief.", "Be brief.\n\nWhy?A:"),
        (LLAMA2, "auto", "", "<s>[INST] Why? [/INST]A:"),
        (LLAMA2, "auto", "Be brief.", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhy? [/INST]A:"),
        (LLAMA2, "none", "Be brief.", "Be brief.\n\nWhy?A:"),
        (
            CHATML,
            "auto",
            "Be brief.",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nA:",
        ),
        (
            GEMMA,
            "auto",
            "Be brief.",
            "<s><start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nA:",
        ),
        (
            None,
            "vicuna",
            "",
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
            "and polite answers to the user's questions. USER: Why? ASSISTANT:A:",
        ),
        (LLAMA2, "vicuna", "Be brief.", "Be brief. USER: Why? ASSISTANT:A:"),
    ],
)
@pytest.mark.parametrize("bos", [True, False])
def test_templates_and_the_beginning_of_sequence(
    template: str, name: str, system: str, wanted: str, bos: bool
) -> None:
    lm = reader(template, name, bos)
    assert lm.render("Why?", system=system, prefill="A:") == wanted
    encoded = lm.encode("Why?", system=system, prefill="A:")
    assert encoded.text == wanted
    spelt = lm.tokenizer.decode(encoded.ids)  # type: ignore[union-attr]
    assert spelt.replace(" ", "") == ("<s>" * (bos and not wanted.startswith("<s>")) + wanted).replace(
        " ", ""
    )
    assert encoded.ids.count(0) == int(bos or wanted.startswith("<s>")), (
        "the beginning of sequence exactly once"
    )
    at = [wanted_span for wanted_span in encoded.offsets if wanted_span != (0, 0)]
    assert at == [(i, i + 1) for i in range(4)], "offsets count characters of the task's prompt"
    assert lm.render("Why?", chat=False) == "Why?"


def test_unknown_templates_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.chat_template.*auto \| none \| vicuna"):
        posbench.load("tiny", chat_template="vicunna")


def test_middle_truncation_is_longbenchs() -> None:
    """First int(n / 2) and last int(n / 2) tokens of the bare prompt, decoded and joined, before the
    template."""
    prompt = "".join(chr(97 + i % 26) for i in range(200))
    lm = reader(LLAMA2)
    ids = lm.tokenizer(prompt)["input_ids"]  # type: ignore[operator]
    for most in (50, 51):
        half = most // 2
        text = "".join(
            lm.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])
        )  # type: ignore[union-attr]
        cut = lm.encode(prompt, truncation="middle", most=most)
        assert cut.text == f"<s>[INST] {text} [/INST]"
        assert cut.dropped == len(ids) - len(lm.tokenizer(text)["input_ids"])  # type: ignore[operator]
        for (first, last), token in zip(cut.offsets, cut.ids, strict=True):
            assert (first, last) == (0, 0) or lm.tokenizer.decode([token]) == prompt[first:last]  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"201.*at most 50 tokens before any chat template"):
        lm.encode(prompt, most=50)
    # Without a length of its own the prompt takes what window, template and answer leave.
    lm.context_window = 100
    cut = lm.encode(prompt, truncation="middle", reserve=10)
    assert 85 <= len(cut.ids) <= 90
    lm.context_window = 20
    with pytest.raises(UserError, match="larger context window"):
        lm.encode(prompt, truncation="middle", reserve=10)


@pytest.mark.parametrize("kind", ["document", "words"])
def test_document_truncation_keeps_the_question(kind: Any) -> None:
    document, separator = " ".join(f"w{i:03d}" for i in range(600)), " [cut]"
    prompt = f"Read. {document} Question: why?"
    span = (6, 6 + len(document))
    lm = reader(LLAMA2, window=2000)
    whole = lm.encode(prompt, truncation=kind, document=span, separator=separator, reserve=100)
    inner = whole.text.removeprefix("<s>[INST] ").removesuffix(" [/INST]")
    kept = inner.removeprefix("Read. ").removesuffix(" Question: why?").removesuffix(separator)
    assert document.startswith(kept) and f"{kept}{separator} Question: why?" in inner
    assert len(whole.ids) <= 1900
    if kind == "document":
        assert len(whole.ids) >= 1890, "no more is cut than must be"
    else:
        assert len(kept.split(" ")) == 350, "250 words at a time, as L-Eval"
    last = whole.offsets[-len(" [/INST]") - 1]
    assert last == (len(prompt) - 1, len(prompt)), "spans behind the cut still count in the task's prompt"
    fits = reader(LLAMA2).encode(prompt, truncation=kind, document=span, separator=separator)
    assert fits.dropped == 0 and separator not in fits.text
    lm.context_window = 60
    with pytest.raises(UserError, match="prompt length"):
        lm.encode(prompt, truncation=kind, document=span, reserve=30)


def test_stop_texts_and_shortest_replies() -> None:
    lm = reader()
    # A random model would also say specials and tokens that the tokenizer has not got.
    others = torch.tensor([i for i in range(lm.model.config.vocab_size) if not 3 <= i < len(lm.tokenizer)])  # type: ignore[arg-type]
    lm.model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, others, -1e9))
    prompts = [lm.encode(text).ids for text in ("Tell me", "And what about this?", "x")]
    full = lm.generate(prompts, max_new_tokens=8)
    assert all(len(text) == 8 for text in full)
    letters = sorted(set("".join(full)))
    for stop in (*letters, full[0][2:4], full[1][1:4]):
        wanted = [text.split(stop, 1)[0] for text in full]
        assert lm.generate(prompts, max_new_tokens=8, stop=[stop]) == wanted
    both = (full[0][4], full[2][3:6])
    wanted = [min((text.split(stop, 1)[0] for stop in both), key=len) for text in full]
    assert lm.generate(prompts, max_new_tokens=8, stop=both) == wanted
    assert lm.generate(prompts[:1], max_new_tokens=8, stop=[full[0][0]]) == [""], "a reply may be empty"
    longer = lm.generate(prompts[:1], max_new_tokens=8, stop=[full[0][0]], min_new_tokens=1)[0]
    assert longer and longer[0] != full[0][0]


def test_a_stop_text_that_the_tokenizer_cannot_spell_never_comes(tiny: LM) -> None:
    rows = [
        tiny.encode(e.prompt).ids
        for e in KVRetrieval(
            pairs=8, positions=(0, 7), examples_per_position=1, prompt="compact", records="words"
        ).examples("evaluation")
    ]
    assert tiny.generate(rows, max_new_tokens=3, stop=["\n", "Question:"]) == tiny.generate(
        rows, max_new_tokens=3
    )


def test_the_checkpoints_own_generation_settings_are_not_consulted(tiny: LM) -> None:
    prompt = KVRetrieval(
        pairs=8, positions=(0,), examples_per_position=1, prompt="compact", records="words"
    ).examples("evaluation")
    rows = [tiny.encode(prompt[0].prompt).ids]
    plain = tiny.generate(rows, max_new_tokens=5)
    config = tiny.model.generation_config
    before = config.to_dict()
    config.update(do_sample=True, temperature=9.0, num_beams=1, repetition_penalty=5.0, max_length=7)
    try:
        assert [tiny.generate(rows, max_new_tokens=5) for _ in range(3)] == [plain] * 3
    finally:
        config.update(**before)
    assert tiny.generate(rows, max_new_tokens=5, repetition_penalty=1e6) != plain


METHODS = {"none": Unmodified(), "scaled": ScaleChannel(channel=3, factor=-1.0, layers=(0, 1))}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2"])
def test_choices_on_one_prefill_equal_one_forward_each(family: str, method: Any) -> None:
    torch.manual_seed(1)
    model = BUILDERS[family]().double()
    lm = posbench.load(model)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(5, vocabulary, (n,)).tolist() for n in (9, 14, 5)]
    choices = [
        [torch.randint(5, vocabulary, (n,)).tolist() for n in lengths]
        for lengths in ((1, 3, 2), (2,), (1, 1, 4))
    ]
    forwards = []
    with method.applied(lm), torch.inference_mode():
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(1))
        found = lm.continuations(prompts, choices, batch_size=2)
        handle.remove()
        for prompt, row, got in zip(prompts, choices, found, strict=True):
            assert len(got) == len(row)
            for choice, (total, greedy) in zip(row, got, strict=True):
                # Independent: the prompt again for each choice, fed token by token on its own cache.
                out = lm.model(input_ids=torch.tensor([prompt]), use_cache=True)
                logits = out.logits[0, -1]
                want, best = 0.0, True
                for token in choice:
                    want += float(logits.log_softmax(-1)[token])
                    best &= int(logits.argmax()) == token
                    out = lm.model(
                        input_ids=torch.tensor([[token]]),
                        past_key_values=fork(out.past_key_values),
                        use_cache=True,
                    )
                    logits = out.logits[0, -1]
                assert total == pytest.approx(want, abs=2e-5) and greedy is best


def test_batches_hold_a_budget_of_tokens() -> None:
    lengths = [10, 3, 3, 8, 2, 30, 9]
    plan = batches(lengths, 3, tokens=20)
    assert plan == [[5], [0, 6], [3, 1], [2, 4]]
    for group in plan:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 20
    assert sorted(i for group in plan for i in group) == list(range(7))
    assert batches(lengths, 3) == [[5, 0, 6], [3, 1, 2], [4]]


def _bare(system: str, prompt: str, prefill: str) -> str:
    return (system + "\n\n" if system else "") + prompt + prefill


TEMPLATES: dict[str, tuple[str | None, str, Any]] = {
    "bare": (None, "auto", _bare),
    "llama2": (
        LLAMA2,
        "auto",
        lambda system, prompt, prefill: (
            "<s>[INST] "
            + (f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else "")
            + prompt
            + " [/INST]"
            + prefill
        ),
    ),
    "chatml": (
        CHATML,
        "auto",
        lambda system, prompt, prefill: (
            (f"<|im_start|>system\n{system}<|im_end|>\n" if system else "")
            + f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            + prefill
        ),
    ),
    "no system role": (
        GEMMA,
        "auto",
        lambda system, prompt, prefill: (
            "<s><start_of_turn>user\n"
            + _bare(system, prompt, "")
            + "<end_of_turn>\n<start_of_turn>model\n"
            + prefill
        ),
    ),
    "vicuna": (
        None,
        "vicuna",
        lambda system, prompt, prefill: (
            (
                system
                or "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
                "detailed, and polite answers to the user's questions."
            )
            + f" USER: {prompt} ASSISTANT:"
            + prefill
        ),
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", test_tasks.TASKS)
def test_every_task_in_every_kind_of_template(name: str, template: str, tmp_path: Path) -> None:
    """The prompts themselves are held character by character in each task's own tests."""
    text, chosen, wanted = TEMPLATES[template]
    lm = reader(text, chosen)
    fields = dict(o.removeprefix("task.").split("=", 1) for o in test_tasks.TASKS[name][0](tmp_path))
    values = {key: yaml.safe_load(value) for key, value in fields.items()}
    task = build(
        get_class(yaml.safe_load((paths.CONF / f"task/{name}.yaml").read_text())["_target_"]), values, "task"
    )
    seen = set()
    for e in task.evaluation():
        rendered = lm.render(e.prompt, chat=e.chat, system=e.system, prefill=e.prefill)
        assert rendered == (wanted if e.chat else _bare)(e.system, e.prompt, e.prefill)
        seen.add(e.chat)
    # LongBench leaves the template out for six data sets, and so do the exams.
    assert seen == {"longbench": {True, False}, "mmlu": {False}, "ceval": {False}}.get(name, {True})
