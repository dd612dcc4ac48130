"""Encoding, batching, generation and attention rows."""

import numpy as np
import pytest
import torch

import posbench
from posbench.errors import UserError
from posbench.methods import ScaleChannel
from posbench.model.lm import batches
from posbench.pipeline.stages.intervene import attention_to_items
from posbench.tasks import KVRetrieval
from tests.models import VOCABULARY, build

SMALL = dict(
    prompt="compact", records="words", pairs=6, examples_per_position=2, max_new_tokens=1, positions=(0, 3, 5)
)


@pytest.fixture(scope="module")
def tiny():
    return posbench.load("tiny")


def test_batches_hold_every_prompt_once_longest_first():
    lengths = [5, 9, 2, 9, 7]
    plan = batches(lengths, 2)
    assert plan == [[1, 3], [4, 0], [2]]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2"])
def test_last_attention_equals_full_eager_attention(name):
    lm = posbench.load(build(name))
    ids = torch.randint(1, VOCABULARY, (3, 30))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    call = dict(input_ids=ids, attention_mask=mask, position_ids=positions)
    kernel = lm.model.config._attn_implementation
    with torch.no_grad():
        with lm.last_attention() as rows:
            inside = lm.model(**call).logits
        assert lm.model.config._attn_implementation == kernel
        assert torch.equal(lm.model(**call).logits, inside)
        lm.model.set_attn_implementation("eager")
        full = lm.model(**call, output_attentions=True).attentions
    for layer, weights in enumerate(full):
        torch.testing.assert_close(rows[layer], weights[:, :, -1], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(rows[layer].sum(-1), torch.ones(3, weights.shape[1]))


def test_last_attention_sees_the_scaled_queries_and_keys():
    lm = posbench.load(build("llama"))
    ids = torch.randint(1, VOCABULARY, (1, 20))
    attention = lm.model.model.layers[2].self_attn
    captured = {}
    hook = attention.register_forward_pre_hook(
        lambda module, args, kwargs: captured.__setitem__("h", kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        lm.model(ids)
        hidden = captured["h"].clone()
        hook.remove()
        hidden[..., 5] *= -1
        q, k = (
            p(hidden).unflatten(-1, (4, -1)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj)
        )
        cos, sin = lm.model.model.rotary_emb(hidden, torch.arange(20)[None])
        turn = lambda x: x * cos[:, None] + torch.cat([-x[..., 6:], x[..., :6]], -1) * sin[:, None]  # noqa: E731
        expected = ((turn(q)[:, :, -1:] @ turn(k).transpose(-1, -2)) * 12**-0.5).softmax(-1)[:, :, 0]
        with ScaleChannel(channel=5, factor=-1.0, layers=(2, 2)).applied(lm), lm.last_attention() as rows:
            lm.model(ids)
    torch.testing.assert_close(rows[2], expected, atol=1e-6, rtol=1e-5)


def test_attention_to_items_is_the_mean_over_each_pairs_tokens(tiny):
    examples = KVRetrieval(**SMALL).examples("evaluation")[:2]
    encoded = [tiny.encode(e.prompt) for e in examples]
    found = attention_to_items(tiny, encoded, examples)
    with torch.no_grad():
        tiny.model.set_attn_implementation("eager")
        full = tiny.model(torch.tensor([e.ids for e in encoded]), output_attentions=True).attentions
        tiny.model.set_attn_implementation("sdpa")
    for row, (code, example) in enumerate(zip(encoded, examples, strict=True)):
        for item, (start, end) in enumerate(example.items):
            tokens = [i for i, (a, b) in enumerate(code.offsets) if a < end and b > start]
            text = example.prompt[start:end]
            assert text.startswith('"') and text.count('"') == 4 and tokens
            for layer, weights in enumerate(full):
                expected = np.mean([weights[row, :, -1, t].mean().item() for t in tokens])
                assert found[row, layer, item].item() == pytest.approx(expected, abs=1e-6)


def test_generation_does_not_depend_on_the_batch(tiny):
    prompts = [
        e.prompt
        for pairs in (5, 6)
        for e in KVRetrieval(**(SMALL | {"pairs": pairs, "positions": (0, 2)})).examples("evaluation")
    ]
    alone = [tiny.generate([p], max_new_tokens=1)[0] for p in prompts]
    assert tiny.generate(prompts, max_new_tokens=1, batch_size=8) == alone
    assert len(set(alone)) > 1


def test_generation_is_greedy_whatever_the_checkpoint_says(tiny):
    prompt = KVRetrieval(**SMALL).examples("evaluation")[0].prompt
    before = tiny.model.generation_config
    expected = tiny.generate([prompt], max_new_tokens=3)
    sampling = type(before)(do_sample=True, temperature=50.0, max_new_tokens=1)
    tiny.model.generation_config = sampling
    try:
        assert tiny.generate([prompt], max_new_tokens=3) == expected
        assert tiny.model.generation_config is sampling
    finally:
        tiny.model.generation_config = before


def test_prompts_over_the_window_are_refused_or_cut_in_the_middle(tiny):
    lm = posbench.load("tiny", context_window=20)
    prompt = KVRetrieval(**SMALL).examples("evaluation")[0].prompt
    ids = tiny.encode(prompt).ids
    with pytest.raises(UserError, match="at most 19 tokens"):
        lm.encode(prompt, reserve=1)
    cut = lm.encode(prompt, reserve=1, truncation="middle")
    assert cut.ids == ids[:9] + ids[-9:]  # LongBench keeps int(19 / 2) tokens of each end
    assert cut.dropped == len(ids) - 18
    assert len(cut.offsets) == len(cut.ids)


def test_chat_template_is_applied_by_rule_and_offsets_point_into_the_prompt(tiny):
    lm = posbench.load("tiny")
    lm.chat_template = "auto"
    lm.tokenizer.chat_template = "{% for m in messages %}bal bap {{ m['content'] }}{% endfor %}"
    prompt = KVRetrieval(**SMALL).examples("evaluation")[0].prompt
    assert lm.render(prompt) == "bal bap " + prompt
    encoded = lm.encode(prompt)
    spans = [prompt[a:b] for a, b in encoded.offsets if b > a]
    assert "".join(spans) == prompt
    lm.chat_template = "none"
    assert lm.render(prompt) == prompt


def test_answer_loss_is_the_cross_entropy_of_the_answer(tiny):
    examples = KVRetrieval(**SMALL).examples("evaluation")
    found = tiny.answer_loss([e.prompt for e in examples], [e.answers[0] for e in examples], batch_size=4)
    for example, loss in zip(examples, found, strict=True):
        prompt, answer = tiny.answer_ids(example.prompt, example.answers[0])
        assert len(answer) == 1
        logits = tiny.logits(torch.tensor([prompt]))[0, -1]
        assert loss.item() == pytest.approx(-logits.log_softmax(-1)[answer[0]].item(), abs=1e-4)


def test_a_model_without_tokenizer_says_so():
    lm = posbench.load(build("llama"))
    with pytest.raises(UserError, match="tokenizer"):
        lm.generate(["text"], max_new_tokens=1)
