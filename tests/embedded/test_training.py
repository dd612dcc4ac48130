"""Tokenizer, training data, networks, starts and the training of the embedded models."""

import math
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posbench import paths
from posbench.embedded import training
from posbench.embedded.data import (
    BLOCK,
    block_mask,
    draw_batch,
    draw_contexts,
    end_prior,
)
from posbench.embedded.network import alibi_slopes, block_logits, build_model
from posbench.embedded.recipe import RECIPES, SHIPPED_SEEDS, Recipe, TrainStage
from posbench.embedded.start import CLOCK_CHANNEL, rope_tables, rotate
from posbench.embedded.tokenizer import FIRST_WORD, VOCAB, build_tokenizer
from posbench.embedded.training import (
    TRAINING_FILE,
    batch_for,
    batch_loss,
    learning_rate,
    save,
    train,
)
from posbench.tasks.kv_retrieval import WORDS, compact_prompt
from tests.rounding import assert_same, noise_floor

torch.set_num_threads(1)
MICRO = Recipe(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    questions=3,
    batch_questions=60,
    min_contexts=2,
    stages=(
        TrainStage("first", 5, (3, 4), 1e-3, 0.1, 0.4),
        TrainStage("second", 4, (3, 4), 1e-3, 0.1, 0.0),
    ),
)


def prompt(batch, context, question):
    """Token ids of one question as a prompt of its own."""
    return torch.cat(
        [batch.ids[context, : 4 * batch.pairs], batch.blocks[context, question, :3]]
    )


def records(pairs, seed=0):
    rng = torch.Generator().manual_seed(seed)
    keys, values = (torch.randperm(len(WORDS), generator=rng)[:pairs] for _ in range(2))
    return [(WORDS[k], WORDS[v]) for k, v in zip(keys, values, strict=True)]


@pytest.fixture(scope="module", params=["built", *SHIPPED_SEEDS])
def tokenizer(request):
    if request.param == "built":
        return build_tokenizer()
    return AutoTokenizer.from_pretrained(
        paths.MODELS / request.param, local_files_only=True
    )


def test_one_token_per_word_and_four_per_pair(tokenizer):
    prompt, _ = compact_prompt(records(32), records(32)[5][0])
    assert len(tokenizer(prompt)["input_ids"]) == 4 * 32 + 3
    for word in WORDS:
        assert tokenizer(word)["input_ids"] == [VOCAB[word]]


def test_prompt_round_trip_and_offsets(tokenizer):
    pairs = records(8)
    prompt, spans = compact_prompt(pairs, pairs[3][0])
    encoding = tokenizer(prompt, return_offsets_mapping=True)
    assert tokenizer.decode(encoding["input_ids"]) == prompt
    offsets = encoding["offset_mapping"]
    assert offsets[0][0] == 0 and offsets[-1][1] == len(prompt)
    assert all(left[1] == right[0] for left, right in pairwise(offsets))
    for (key, value), (start, end) in zip(pairs, spans, strict=True):
        inside = [i for i, (a, b) in enumerate(offsets) if a >= start and b <= end]
        texts = [tokenizer.decode(encoding["input_ids"][i]) for i in inside]
        assert key in texts and value in texts


def test_unknown_text_is_unknown_tokens_and_the_end_token_is_not_text(tokenizer):
    ids = tokenizer('Zebra é 中\n"')["input_ids"]
    assert ids[-1] == VOCAB['"'] and set(ids[:-1]) == {tokenizer.unk_token_id}
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == VOCAB["<|end|>"]
    assert (
        tokenizer.decode(
            [VOCAB["bal"], VOCAB['"'], VOCAB["<|end|>"]], skip_special_tokens=True
        )
        == 'bal"'
    )


def test_generated_context_is_the_tasks_prompt():
    rng = torch.Generator().manual_seed(3)
    batch = draw_batch(2, 5, 4, end_prior(5, 0.08, 0.5), 0.0, rng)
    tokenizer = build_tokenizer()
    text = tokenizer.decode(prompt(batch, 1, 2))
    gold = int(batch.gold[1, 2])
    context = tokenizer.convert_ids_to_tokens(batch.ids[1, :20].tolist())
    pairs = list(zip(context[1::4], context[3::4], strict=True))
    assert text == compact_prompt(pairs, pairs[gold][0])[0]
    assert tokenizer.decode(batch.blocks[1, 2, 3:]) == pairs[gold][1] + '"'


def test_keys_and_values_are_distinct_words():
    _, keys, values = draw_contexts(50, 64, torch.Generator().manual_seed(0))
    for words in (keys, values):
        assert all(len(set(row)) == 64 for row in words.tolist())
        assert words.min() >= FIRST_WORD and words.max() < len(VOCAB)


def test_gold_follows_the_prior_and_noise_replaces_the_key():
    rng = torch.Generator().manual_seed(0)
    prior = end_prior(10, 0.08, 0.1)
    assert float(prior.sum()) == pytest.approx(1) and torch.allclose(
        prior, prior.flip(0)
    )
    batch = draw_batch(400, 10, 16, prior, 0.4, rng)
    share = torch.bincount(batch.gold.flatten(), minlength=10) / batch.gold.numel()
    assert (share - prior).abs().max() < 0.02
    gold_key = batch.ids[:, 1:40:4].gather(1, batch.gold)
    wrong = (batch.blocks[:, :, 1] != gold_key).float().mean()
    assert float(wrong) == pytest.approx(0.4 * 63 / 64, abs=0.03)
    assert torch.equal(
        batch.blocks[:, :, 3], batch.ids[:, 3:40:4].gather(1, batch.gold)
    )


def test_block_mask_hides_other_blocks_and_the_future():
    mask = block_mask(8, 3)
    assert mask.shape == (8 + 3 * BLOCK,) * 2
    assert not mask.triu(1).any() and mask[:, :8].tril().equal(
        torch.ones_like(mask[:, :8]).tril()
    )
    assert not mask[8 + BLOCK :, 8 : 8 + BLOCK].any()
    assert mask[8 + BLOCK + 2, 8 + BLOCK : 8 + BLOCK + 3].all()


@pytest.mark.parametrize("name", ["tiny", "tiny_nope", "tiny_alibi"])
def test_blocks_equal_separate_prompts_on_a_random_model(name):
    model = build_model(RECIPES[name], torch.Generator().manual_seed(0)).eval()
    batch = draw_batch(
        2, 6, 3, end_prior(6, 0.08, 0.5), 0.3, torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        blocks = block_logits(model, batch)
        for context in range(2):
            for question in range(3):
                ids = torch.cat(
                    [
                        prompt(batch, context, question),
                        batch.blocks[context, question, 3:],
                    ]
                )
                expected = model(ids[None]).logits[0, -3:]
                noise = noise_floor(model, ids[None])
                assert_same(blocks[context, question], expected, noise, "logits")


def test_offset_heads_start_by_looking_back():
    recipe = Recipe()
    model = build_model(recipe, torch.Generator().manual_seed(0)).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(
        FIRST_WORD, len(VOCAB), (4, 40), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[0]
    for head, offset in enumerate(recipe.offsets):
        looked_at = weights[:, head, 5:].argmax(-1)
        expected = torch.arange(5, 40) - offset
        assert (looked_at == expected).float().mean() > 0.9


def start_weights(name, pairs):
    """Attention per layer, [12, heads, T, T], of a fresh model on 12 prompts, and where its last tokens
    sit."""
    model = build_model(RECIPES[name], torch.Generator().manual_seed(0)).eval()
    model.set_attn_implementation("eager")
    batch = draw_batch(
        12,
        pairs,
        1,
        torch.full((pairs,), 1 / pairs),
        0.0,
        torch.Generator().manual_seed(1),
    )
    prompts = torch.stack([prompt(batch, context, 0) for context in range(12)])
    with torch.no_grad():
        out = model(prompts, output_attentions=True, output_hidden_states=True)
    return out, batch.gold[:, 0]


def test_the_nope_start_counts_and_carries_keys_to_their_values():
    out, gold = start_weights("tiny_nope", 12)
    clock = out.hidden_states[1][:, :, CLOCK_CHANNEL]
    assert (clock.diff(dim=1) < 0).float().mean() > 0.99
    colons = torch.arange(2, 48, 4)
    values = torch.arange(3, 48, 4)
    assert out.attentions[1][:, 0, colons[1:], colons[1:] - 1].mean() > 0.9
    assert out.attentions[2][:, 0, values, values - 1].mean() > 0.9
    # The question's end finds the value of the asked key before any training.
    assert out.attentions[3][torch.arange(12), 0, -1, 4 * gold + 3].mean() > 0.5


def test_the_alibi_start_prefers_the_nearest_word():
    out, _ = start_weights("tiny_alibi", 12)
    colons = torch.arange(10, 48, 4)
    near, before = (
        out.attentions[0][:, 0, colons, colons - back].mean() for back in (1, 3)
    )
    assert near > 1.3 * before
    torch.testing.assert_close(
        alibi_slopes(4), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    )


def test_rotation_preserves_lengths_and_depends_on_distance_only():
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.tensor([3, 10, 53, 60]), 16, 10000.0)
    turned_q, turned_k = (rotate(x.expand(4, 16), cos, sin) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(4))
    torch.testing.assert_close(turned_q[1] @ turned_k[0], turned_q[3] @ turned_k[2])


def test_schedule_and_batches_follow_the_recipe():
    recipe = Recipe()
    stage = Recipe().stages[0]
    rates = [learning_rate(recipe, stage, step) for step in range(stage.steps)]
    assert rates[0] < rates[50] < max(rates) == pytest.approx(stage.lr)
    assert rates[-1] == pytest.approx(recipe.final_lr * stage.lr, rel=0.1)
    rng = torch.Generator().manual_seed(0)
    early = [batch_for(recipe, stage, 0, rng).pairs for _ in range(40)]
    late = [batch_for(recipe, stage, stage.steps - 1, rng).pairs for _ in range(40)]
    assert (
        min(early) >= stage.pairs[0]
        and max(early) <= stage.grow_from < max(late) <= stage.pairs[1]
    )


def test_loss_of_right_answers_is_small_and_counts_the_closing():
    batch = draw_batch(
        2, 4, 3, end_prior(4, 0.08, 0.5), 0.0, torch.Generator().manual_seed(0)
    )
    logits = torch.zeros(2, 3, 3, len(VOCAB))
    logits[:, :, 0].scatter_(-1, batch.blocks[:, :, 3:4], 50.0)
    loss, accuracy = batch_loss(logits, batch, 0.1)
    assert float(accuracy) == 1 and float(loss) == pytest.approx(
        2 * 0.1 * math.log(len(VOCAB)), rel=1e-4
    )


def test_training_is_deterministic_and_the_folder_is_complete(tmp_path):
    (first, log), (second, _) = (train(MICRO, 5) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    save(first, log, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True
    ).eval()
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, first(ids).logits)
    assert {p.name for p in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        TRAINING_FILE,
    }
    # Nothing is overwritten, and a failure in the middle leaves no folder.
    with pytest.raises(OSError):
        save(first, log, tmp_path / "model")
    with pytest.raises(TypeError):
        save(first, {"recipe": object()}, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("stops", [1, 2, 3, 4])
def test_a_killed_training_goes_on_bit_for_bit(tmp_path, monkeypatch, stops):
    monkeypatch.setattr(training, "REPORT_EVERY", 2)
    whole, log = train(MICRO, 3)
    assert [row["step"] for row in log["curves"]] == [2, 4, 5, 2, 4]
    calls = []

    def kill(steps, before=False):
        calls.append(steps)
        if len(calls) == stops + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(MICRO, 3, tmp_path / "checkpoint.pt", kill)
    done = []
    again, resumed = train(
        MICRO,
        3,
        tmp_path / "checkpoint.pt",
        lambda n, before=False: done.append((n, before)),
    )
    assert done == [(sum(calls), True), *((n, False) for n in [2, 2, 1, 2, 2][stops:])]
    assert resumed["curves"] == log["curves"] and str(resumed["probes"]) == str(
        log["probes"]
    )  # some are nan
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
