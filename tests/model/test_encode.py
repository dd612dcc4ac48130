"""From an example to tokens: templates, the beginning of sequence, truncation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import posbench
from posbench import paths
from posbench.measure.items import item_tokens
from posbench.model.lm import LM
from posbench.schema import build, resolve_target
from posbench.tasks import Example, Task
from tests.cli import task_files
from tests.messages import refused
from tests.models import BUILDERS

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ bos_token + '[INST] ' + system + messages[0]['content'] + ' [/INST]' }}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>user\n' + messages[0]['content'] + '<end_of_turn>\n<start_of_turn>model\n' }}"
)


def characters(bos: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, so that lengths and cuts can be read off."""
    letters = sorted({chr(c) for c in range(32, 127)} | {"\n", "é"})
    vocabulary = {
        token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *letters])
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def reader(
    template: str | None = None,
    chat_template: str = "auto",
    bos: bool = True,
    window: int = 4096,
) -> LM:
    """A random model behind the character tokenizer."""
    torch.manual_seed(0)
    tokenizer = characters(bos)
    tokenizer.chat_template = template
    lm = posbench.load(BUILDERS["llama"](), tokenizer=tokenizer)
    lm.chat_template = chat_template
    lm.context_window = window
    return lm


BARE = "{prompt}{prefill}", "{system}\n\n{prompt}{prefill}"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. USER: {prompt} ASSISTANT:{prefill}",
    "{system} USER: {prompt} ASSISTANT:{prefill}",
)
TEMPLATES: dict[str, tuple[str | None, str, tuple[str, str]]] = {
    "bare": (None, "auto", BARE),
    "switched off": (LLAMA2, "none", BARE),
    "llama2": (
        LLAMA2,
        "auto",
        (
            "<s>[INST] {prompt} [/INST]{prefill}",
            "<s>[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{prompt} [/INST]{prefill}",
        ),
    ),
    "chatml": (
        CHATML,
        "auto",
        (
            "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{prefill}",
            "<|im_start|>system\n{system}<|im_end|>\n"
            "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{prefill}",
        ),
    ),
    "no system role": (
        GEMMA,
        "auto",
        (
            "<s><start_of_turn>user\n{prompt}<end_of_turn>\n<start_of_turn>model\n{prefill}",
            "<s><start_of_turn>user\n{system}\n\n{prompt}<end_of_turn>\n<start_of_turn>model\n{prefill}",
        ),
    ),
    "vicuna": (None, "vicuna", VICUNA),
    "vicuna over the tokenizer's own": (LLAMA2, "vicuna", VICUNA),
}
"""Template of the tokenizer, model.chat_template, and the prompt without and with a system message."""


def wanted(patterns: tuple[str, str], prompt: str, system: str, prefill: str) -> str:
    return patterns[bool(system)].format(prompt=prompt, system=system, prefill=prefill)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("bos", [True, False])
def test_templates_and_the_beginning_of_sequence(
    name: str, system: str, bos: bool
) -> None:
    template, chosen, patterns = TEMPLATES[name]
    lm = reader(template, chosen, bos)
    text = wanted(patterns, "Why?", system, "A:")
    assert lm.render("Why?", system=system, prefill="A:") == text
    encoded = lm.encode("Why?", system=system, prefill="A:")
    assert encoded.text == text
    spelt = lm.tokenizer.decode(encoded.ids)  # type: ignore[union-attr]
    begun = "<s>" * (bos and not text.startswith("<s>")) + text
    assert spelt.replace(" ", "") == begun.replace(" ", "")
    once = "the beginning of sequence exactly once"
    assert encoded.ids.count(0) == int(bos or text.startswith("<s>")), once
    at = [span for span in encoded.offsets if span != (0, 0)]
    assert at == [(i, i + 1) for i in range(4)], (
        "offsets count characters of the task's prompt"
    )
    assert lm.render("Why?", chat=False) == "Why?"


def test_unknown_templates_are_refused() -> None:
    with refused(
        "model.chat_template",
        "vicunna",
        allowed=("auto", "none", "vicuna"),
        hint="model.chat_template=auto",
    ):
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
            lm.tokenizer.decode(part, skip_special_tokens=True)
            for part in (ids[:half], ids[-half:])
        )  # type: ignore[union-attr]
        cut = lm.encode(prompt, truncation="middle", most=most)
        assert cut.text == f"<s>[INST] {text} [/INST]"
        assert cut.dropped == len(ids) - len(lm.tokenizer(text)["input_ids"])  # type: ignore[operator]
        for (first, last), token in zip(cut.offsets, cut.ids, strict=True):
            assert (first, last) == (0, 0) or lm.tokenizer.decode([token]) == prompt[
                first:last
            ]  # type: ignore[union-attr]
    with refused(
        "prompt length",
        201,
        allowed=("50", "task.max_prompt_tokens"),
        hint="task.truncation=middle",
    ):
        lm.encode(prompt, most=50)
    # Without a length of its own the prompt takes what window, template and answer leave.
    lm.context_window = 100
    cut = lm.encode(prompt, truncation="middle", reserve=10)
    assert 85 <= len(cut.ids) <= 90
    lm.context_window = 20
    with refused("prompt length", 216, allowed=("10", "20"), hint="context window"):
        lm.encode(prompt, truncation="middle", reserve=10)


@pytest.mark.parametrize("kind", ["document", "words"])
def test_document_truncation_keeps_the_question(kind: Any) -> None:
    document = " ".join(f"w{i:03d}" for i in range(600))
    separator = " [cut]"
    prompt = f"Read. {document} Question: why?"
    span = (6, 6 + len(document))
    lm = reader(LLAMA2, window=2000)
    whole = lm.encode(
        prompt, truncation=kind, document=span, separator=separator, reserve=100
    )
    inner = whole.text.removeprefix("<s>[INST] ").removesuffix(" [/INST]")
    kept = (
        inner.removeprefix("Read. ")
        .removesuffix(" Question: why?")
        .removesuffix(separator)
    )
    assert document.startswith(kept) and f"{kept}{separator} Question: why?" in inner
    assert len(whole.ids) <= 1900
    if kind == "document":
        assert len(whole.ids) >= 1890, "no more is cut than must be"
    else:
        assert len(kept.split(" ")) == 350, "250 words at a time, as L-Eval"
    last = whole.offsets[-len(" [/INST]") - 1]
    assert last == (len(prompt) - 1, len(prompt)), (
        "spans behind the cut still count in the task's prompt"
    )
    fits = reader(LLAMA2).encode(
        prompt, truncation=kind, document=span, separator=separator
    )
    assert fits.dropped == 0 and separator not in fits.text
    lm.context_window = 60
    with refused("prompt length", allowed=("30", "60"), hint="context window"):
        lm.encode(prompt, truncation=kind, document=span, reserve=30)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", task_files.TASKS)
def test_every_task_in_every_kind_of_template(
    name: str, template: str, tmp_path: Path
) -> None:
    """The prompts themselves are held character by character in each task's own tests."""
    text, chosen, patterns = TEMPLATES[template]
    lm = reader(text, chosen)
    fields = dict(
        o.removeprefix("task.").split("=", 1)
        for o in task_files.TASKS[name][0](tmp_path)
    )
    cls, _ = resolve_target(
        yaml.safe_load((paths.CONF / f"task/{name}.yaml").read_text()), Task, "task"
    )
    task = build(
        cls, {key: yaml.safe_load(value) for key, value in fields.items()}, "task"
    )
    seen = set()
    for e in task.evaluation():
        rendered = lm.render(e.prompt, chat=e.chat, system=e.system, prefill=e.prefill)
        assert rendered == wanted(
            patterns if e.chat else BARE, e.prompt, e.system, e.prefill
        )
        seen.add(e.chat)
    # LongBench leaves the template out for six data sets, L-Eval for SFiction's facts, the exams for all.
    some = ("longbench", "leval_closed")
    none = ("mmlu", "ceval")
    assert seen == (
        {True, False} if name in some else {False} if name in none else {True}
    )


PROMPT = (
    'Json data: {"bal": "kop", "dip": "gel", "mop": "nap"} The value of key "dip" is "'
)


def test_prompts_over_the_window_are_refused_or_cut_in_the_middle(tiny: LM) -> None:
    ids = tiny.encode(PROMPT).ids
    lm = posbench.load("tiny", context_window=len(ids) - 3)
    with refused(
        "prompt length",
        len(ids),
        allowed=str(len(ids) - 4),
        hint="task.truncation=middle",
    ):
        lm.encode(PROMPT, reserve=1)
    cut = lm.encode(PROMPT, reserve=1, truncation="middle")
    half = (len(ids) - 4) // 2
    assert cut.ids == ids[:half] + ids[-half:], (
        "LongBench keeps the whole half of each end"
    )
    assert cut.dropped == len(ids) - 2 * half and len(cut.offsets) == len(cut.ids)


@pytest.mark.parametrize("kind", ["document", "words"])
def test_a_prompt_without_a_document_is_not_cut_at_its_question(kind: Any) -> None:
    lm = reader(window=40)
    with refused("task.truncation", kind, allowed="middle", hint="middle"):
        lm.encode("Context. " * 9 + "Question?", truncation=kind, reserve=1)


@pytest.mark.parametrize("prompt", ["Ann. Bob. Answer: ", "\n  Ann. Bob.\n", "Ann."])
def test_offsets_point_into_a_prompt_that_a_template_strips(prompt: str) -> None:
    """As those of Llama 2 and 3 and Gemma do."""
    lm = reader("{% for m in messages %}user {{ m['content'] | trim }}|end{% endfor %}")
    encoded = lm.encode(prompt)
    assert encoded.text == f"user {prompt.strip()}|end"
    covered = [prompt[a:b] for a, b in encoded.offsets if b > a]
    assert "".join(covered) == prompt.strip()
    # The first token of the prompt stands behind the beginning and the header.
    first = next(i for i, (a, b) in enumerate(encoded.offsets) if b > a)
    assert encoded.offsets[first][0] == prompt.index("Ann")
    assert encoded.text[first - 1 : first + 2] == "Ann"


def test_items_that_a_template_rewrites_are_not_looked_for_elsewhere() -> None:
    lm = reader("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    encoded = lm.encode("Ann. Bob.")
    assert set(encoded.offsets) == {(0, 0)}
    example = Example(
        id="x",
        prompt="Ann. Bob.",
        answers=("a",),
        gold_position=0,
        items=((0, 4), (5, 9)),
    )
    with refused(
        "prompt", "example x", allowed="items", hint="model.chat_template=none"
    ):
        item_tokens(encoded, example)


def test_offsets_of_longer_tokens_point_into_the_prompt() -> None:
    lm = posbench.load("tiny", chat_template="auto")
    lm.tokenizer.chat_template = (
        "{% for m in messages %}bal bap {{ m['content'] }}{% endfor %}"  # type: ignore[union-attr]
    )
    assert lm.render(PROMPT) == "bal bap " + PROMPT
    assert "".join(PROMPT[a:b] for a, b in lm.encode(PROMPT).offsets if b > a) == PROMPT


def test_an_end_of_sequence_that_a_tokenizer_adds_is_left_out() -> None:
    """A reply shall follow the prompt."""
    lm = reader()
    wanted = [lm.encode("Ann? ").ids, *lm.answer_ids("Ann? ", "Bob")]
    lm.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    assert lm.tokenizer("Ann")["input_ids"][-1] == 1
    assert [lm.encode("Ann? ").ids, *lm.answer_ids("Ann? ", "Bob")] == wanted
    assert lm.encode("Ann</s>").ids[-1] == 1, "one that is written stays"


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_template_that_shows_no_message_is_refused(system: str) -> None:
    parts = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    lm = reader(f"U:{parts}{{% endfor %}}{{% endfor %}}")
    with refused("model.chat_template", "auto", hint="model.chat_template=none"):
        lm.encode("Where is Ann?", system=system)


def test_a_template_that_leaves_out_the_system_message_gets_it_with_the_prompt() -> (
    None
):
    users = "{% for m in messages if m.role == 'user' %}U:{{ m.content }}{% endfor %}"
    assert reader(users).render("Who?", system="Be brief.") == "U:Be brief.\n\nWho?"


SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOLS = "{% if tools %}{{ strftime_now('%d') }}{% endif %}"
SOURCES: dict[str, tuple[str | None, list[str]]] = {
    "none": (None, []),
    "plain": (SHOWN, []),
    "date": ("{{ strftime_now('%d %b %Y') }} " + SHOWN, ["the clock"]),
    "weekday": ("{{ strftime_now('%A') }} " + SHOWN, ["the clock"]),
    "minute": ("{{ strftime_now('%M') }} " + SHOWN, ["the clock"]),
    "date where it is known": (
        "{% if strftime_now is defined %}{% set d = strftime_now('%Y') %}{% else %}"
        "{% set d = '2024' %}{% endif %}{{ d }} " + SHOWN,
        ["the clock"],
    ),
    "fixed date": (
        "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}"
        "{% endif %}Today: {{ date_string }}\n" + SHOWN,
        [],
    ),
    "clock for tools alone": (TOOLS + SHOWN, []),
    "clock that is not shown": ("{% set d = strftime_now('%Y') %}" + SHOWN, []),
    "chance": ("{{ ['a', 'b'] | random }} " + SHOWN, ["random numbers"]),
    "both": (
        "{{ strftime_now('%H') }}{{ [1, 2, 3] | random }} " + SHOWN,
        ["the clock", "random numbers"],
    ),
}
"""Template of the tokenizer, and what it reads beside its messages."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_that_reads_the_clock_or_draws_is_known(name: str) -> None:
    template, expected = SOURCES[name]
    state = random.getstate()
    assert reader(template).template_sources("a question") == expected
    assert random.getstate() == state
    switched_off = reader(template, chat_template="none")
    assert switched_off.template_sources("a question") == []


def test_a_template_may_read_the_clock_for_a_system_message_alone() -> None:
    dated = "{% if messages[0].role == 'system' %}{{ strftime_now('%Y') }}{% endif %}"
    lm = reader(dated + SHOWN)
    assert lm.template_sources("a question") == []
    assert lm.template_sources("a question", system="Be short.") == ["the clock"]
