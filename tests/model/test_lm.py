"""Batches, generation, losses, choices and attention rows of a language model."""

import pytest
import torch
from transformers import GenerationConfig

import posbench
from posbench.methods import ScaleChannel, Unmodified
from posbench.model.hooks import fork_cache, replace_attribute
from posbench.model.lm import length_batches
from posbench.model.thinking import split_thinking
from posbench.tasks import KVRetrieval
from tests.messages import refused
from tests.model.test_encode import reader
from tests.models import BUILDERS, VOCABULARY, build
from tests.rounding import (
    assert_same,
    attention_noise,
    embedded_noise,
    log_probabilities,
    noise_floor,
)

SMALL = dict(
    prompt="compact",
    records="words",
    pairs=6,
    limit=2,
    max_new_tokens=1,
    positions=(0, 3, 5),
)
METHODS = {
    "none": Unmodified(),
    "scaled": ScaleChannel(channel=3, factor=-1.0, layers=(0, 1)),
}


def test_batches_are_of_similar_length_longest_first_and_hold_a_budget_of_tokens():
    assert length_batches([5, 9, 2, 9, 7], 2) == [[1, 3], [4, 0], [2]]
    lengths = [10, 3, 3, 8, 2, 30, 9]
    assert length_batches(lengths, 3) == [[5, 0, 6], [3, 1, 2], [4]]
    plan = length_batches(lengths, 3, batch_tokens=20)
    assert plan == [[5], [0, 6], [3, 1], [2, 4]]
    for group in plan:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 20


def test_last_attention_sees_the_scaled_queries_and_keys():
    lm = posbench.load(build("llama"))
    ids = torch.randint(1, VOCABULARY, (1, 20))
    attention = lm.model.model.layers[2].self_attn
    captured = {}
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: captured.__setitem__("h", kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        lm.model(ids)
        hidden = captured["h"].clone()
        hook.remove()
        hidden[..., 5] *= -1
        q, k = (
            p(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
            for p in (attention.q_proj, attention.k_proj)
        )
        cos, sin = lm.model.model.rotary_emb(hidden, torch.arange(20)[None])

        def turn(x):
            half_turn = torch.cat([-x[..., 6:], x[..., :6]], -1)
            return x * cos[:, None] + half_turn * sin[:, None]

        expected = (
            (turn(q)[:, :, -1:] @ turn(k).transpose(-1, -2)) * 12**-0.5
        ).softmax(-1)[:, :, 0]
        with (
            ScaleChannel(channel=5, factor=-1.0, layers=(2, 2)).applied(lm),
            lm.last_attention() as rows,
        ):
            lm.model(ids)
    assert_same(rows[2], expected, attention_noise("llama"), "attention")


def test_generation_does_not_depend_on_the_batch(tiny):
    prompts = [
        e.prompt
        for pairs in (5, 6)
        for e in KVRetrieval(
            **(SMALL | {"pairs": pairs, "positions": (0, 2)})
        ).examples("evaluation")
    ]
    alone = [tiny.generate([p], max_new_tokens=1)[0] for p in prompts]
    assert tiny.generate(prompts, max_new_tokens=1, batch_size=8) == alone
    assert len(set(alone)) > 1


def test_tokens_of_prompts_and_replies_are_counted_without_what_fills_them_up(tiny):
    """Against each prompt alone through the library: neither is filled up there."""
    prompts = [
        e.prompt
        for pairs in (4, 7)
        for e in KVRetrieval(**(SMALL | {"pairs": pairs, "positions": (0,)})).examples(
            "evaluation"
        )
    ]
    read = 0
    written = 0
    new = []
    for prompt in prompts:
        ids = torch.tensor([tiny.encode(prompt).ids])
        out = tiny.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
        read = read + ids.shape[1]
        written = written + out.shape[1] - ids.shape[1]
        new.append(out.shape[1] - ids.shape[1])
    before = tiny.tokens_read, tiny.tokens_written
    tiny.generate(prompts, max_new_tokens=9, batch_size=8)
    assert (tiny.tokens_read - before[0], tiny.tokens_written - before[1]) == (
        read,
        written,
    )
    assert min(new) < 9, "some replies end by themselves"


def test_generation_is_greedy_whatever_the_checkpoint_says(tiny):
    prompts = [KVRetrieval(**SMALL).examples("evaluation")[0].prompt]
    plain = tiny.generate(prompts, max_new_tokens=5)
    before = tiny.model.generation_config
    sampling = {
        "do_sample": True,
        "temperature": 50.0,
        "repetition_penalty": 5.0,
        "max_length": 7,
    }
    tiny.model.generation_config = type(before)(**sampling)
    try:
        assert [tiny.generate(prompts, max_new_tokens=5) for _ in range(3)] == [
            plain
        ] * 3
        assert tiny.model.generation_config.temperature == 50
    finally:
        tiny.model.generation_config = before
    assert tiny.generate(prompts, max_new_tokens=5, repetition_penalty=1e6) != plain


def spelling_reader():
    """A random model that says letters alone, a token each."""
    lm = reader()
    others = torch.tensor(
        [i for i in range(lm.model.config.vocab_size) if not 3 <= i < len(lm.tokenizer)]
    )
    lm.model.lm_head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, others, -1e9)
    )
    return lm


def test_why_a_reply_ended():
    lm = spelling_reader()
    prompts = [lm.encode(text).ids for text in ("Tell me", "And what about this?", "x")]
    full = [reply.text for reply in lm.generate_replies(prompts, max_new_tokens=8)]
    for stop in (full[0][2], full[1][3:5]):
        replies = lm.generate_replies(prompts, max_new_tokens=8, stop=[stop])
        for reply, text in zip(replies, full, strict=True):
            assert reply.finish == ("stop" if stop in text else "length")
    letter = full[2][5]
    (end,) = lm.tokenizer(letter, add_special_tokens=False)["input_ids"]
    settings = GenerationConfig(eos_token_id=end)
    with replace_attribute(lm.model, "generation_config", settings):
        replies = lm.generate_replies(prompts, max_new_tokens=8)
    for reply, text in zip(replies, full, strict=True):
        assert reply.finish == ("end" if letter in text else "length")
    assert replies[2].finish == "end"


def test_a_reply_ends_before_its_end_token_whatever_fills_up_the_batch():
    """An ordinary letter ends replies, also one of id 0, and the tokenizer has no token for filling up."""
    lm = spelling_reader()
    prompts = [lm.encode(text).ids for text in ("Tell me", "And what about this?", "x")]
    full = [reply.text for reply in lm.generate_replies(prompts, max_new_tokens=8)]
    letter = full[2][5]
    (end,) = lm.tokenizer(letter, add_special_tokens=False)["input_ids"]
    settings = GenerationConfig(eos_token_id=end)
    with replace_attribute(lm.model, "generation_config", settings):
        for pad_token in (None, "a"):
            lm.tokenizer.pad_token = pad_token
            replies = lm.generate_replies(prompts, max_new_tokens=8)
            assert [reply.text for reply in replies] == [
                text.split(letter)[0] for text in full
            ]


def test_the_end_token_of_the_checkpoint_counts_also_where_it_is_the_first(tiny):
    asked = []

    def generate_batch(rows, settings, *rest):
        asked.append(settings.eos_token_id)
        return torch.tensor([[5, 0, 7]])

    with (
        replace_attribute(tiny, "_generate_batch", generate_batch),
        replace_attribute(
            tiny.model, "generation_config", GenerationConfig(eos_token_id=0)
        ),
    ):
        (reply,) = tiny.generate_replies([[5]], max_new_tokens=3)
    assert asked == [[0]] and reply.finish == "end"


def test_marks_of_thinking_that_are_special_tokens_stay_in_the_reply():
    lm = reader()
    marks = ["[THINK]", "[/THINK]"]
    lm.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    text = "[THINK]a or b[/THINK]c</s>"
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    with replace_attribute(lm, "_generate_batch", lambda *args: torch.tensor([ids])):
        (reply,) = lm.generate_replies([[3, 4]], max_new_tokens=30)
    split = split_thinking(reply.text)
    assert (split.thinking, split.answer, reply.finish) == ("a or b", "c", "end")


def test_stop_texts_and_shortest_replies():
    lm = spelling_reader()
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
    assert lm.generate(prompts[:1], max_new_tokens=8, stop=[full[0][0]]) == [""], (
        "a reply may be empty"
    )
    longer = lm.generate(
        prompts[:1], max_new_tokens=8, stop=[full[0][0]], min_new_tokens=1
    )[0]
    assert longer and longer[0] != full[0][0]


def test_a_stop_text_that_the_tokenizer_cannot_spell_never_comes(tiny):
    rows = [
        tiny.encode(e.prompt).ids
        for e in KVRetrieval(**SMALL).examples("evaluation")[:2]
    ]
    plain = tiny.generate(rows, max_new_tokens=3)
    assert tiny.generate(rows, max_new_tokens=3, stop=["\n", "Question:"]) == plain


def test_answer_loss_is_the_cross_entropy_of_the_answer(tiny):
    examples = KVRetrieval(**SMALL).examples("evaluation")
    found = tiny.answer_loss(
        [e.prompt for e in examples], [e.answers[0] for e in examples], batch_size=4
    )
    for example, loss in zip(examples, found, strict=True):
        prompt, answer = tiny.answer_ids(example.prompt, example.answers[0])
        assert len(answer) == 1
        logits = tiny.logits(torch.tensor([prompt]))[0, -1]
        noise = embedded_noise("tiny", log_probabilities)
        assert_same(loss, -logits.log_softmax(-1)[answer[0]], noise, "losses")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2"])
def test_choices_on_one_prefill_equal_one_forward_each(family, method):
    torch.manual_seed(1)
    model = BUILDERS[family]()
    noise = noise_floor(model, torch.randint(5, VOCABULARY, (4, 20)), log_probabilities)
    lm = posbench.load(model.double())
    draw = lambda n: torch.randint(5, model.config.vocab_size, (n,)).tolist()  # noqa: E731
    prompts = [draw(n) for n in (9, 14, 5)]
    choices = [[draw(n) for n in lengths] for lengths in ((1, 3, 2), (2,), (1, 1, 4))]
    with method.applied(lm), torch.inference_mode():
        found = lm.continuations(prompts, choices, batch_size=2)
        for prompt, row, got in zip(prompts, choices, found, strict=True):
            assert len(got) == len(row)
            for choice, (total, greedy) in zip(row, got, strict=True):
                # Independent: the prompt again for each choice, fed token by token on its own cache.
                out = lm.model(input_ids=torch.tensor([prompt]), use_cache=True)
                want = 0.0
                best = True
                for token in choice:
                    want += float(out.logits[0, -1].log_softmax(-1)[token])
                    best &= int(out.logits[0, -1].argmax()) == token
                    given = {
                        "past_key_values": fork_cache(out.past_key_values),
                        "use_cache": True,
                    }
                    out = lm.model(input_ids=torch.tensor([[token]]), **given)
                # Norms and rotations are in float32 whatever the dtype.
                assert_same(total, want, len(choice) * noise, "losses")
                assert greedy is best


def test_what_needs_a_tokenizer_or_a_list_says_so(tiny):
    with refused("tokenizer", None, hint="tokenizer=..."):
        posbench.load(build("llama")).generate(["text"], max_new_tokens=1)
    with pytest.raises(TypeError, match=r"pass \[text\]"):
        tiny.generate("text", max_new_tokens=1)


@pytest.mark.parametrize("boundary", [None, 16])
def test_prompts_on_both_sides_of_a_boundary_share_no_batch(boundary: int | None):
    lengths = [20, 3, 17, 16, 5, 30]
    batches = length_batches(lengths, 4, boundary=boundary)
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    is_mixed = [len({lengths[i] > 16 for i in batch}) > 1 for batch in batches]
    assert any(is_mixed) is (boundary is None)


def test_a_longrope_model_reads_a_short_prompt_as_it_does_alone():
    """Its factors are those of the longest prompt of a batch, and change beyond 16 tokens here."""
    lm = posbench.load(build("phi3-longrope"))
    assert lm.rope_boundary == 16
    pairs = [(list(range(1, 9)), [5]), (list(range(1, 40)), [6])]
    together = lm.answer_token_loss(pairs)
    alone = [lm.answer_token_loss([pair]).item() for pair in pairs]
    assert together.tolist() == pytest.approx(alone, abs=1e-5)
