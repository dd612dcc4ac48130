"""The embedded tiny models: tokenizer, training data, training forward, and what the shipped weights show."""

import json
import math
from itertools import pairwise

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posbench import paths
from posbench.embedded import card, study
from posbench.embedded.checks import criteria, kv_task
from posbench.embedded.data import BLOCK, block_mask, draw_batch, draw_contexts, end_prior
from posbench.embedded.network import alibi_slopes, block_logits, build_model
from posbench.embedded.package import CARD_FILE, MEASURED_FILE, SEEDS_FILE
from posbench.embedded.recipe import RECIPES, SHIPPED, Recipe, TrainStage
from posbench.embedded.start import CLOCK_CHANNEL, rope_tables, rotate
from posbench.embedded.study import run_seeds, seeds_table
from posbench.embedded.tiny import main, parse_seeds
from posbench.embedded.tokenizer import FIRST_WORD, VOCAB, build_tokenizer
from posbench.embedded.train import TRAINING_FILE, batch_for, batch_loss, learning_rate, save, train
from posbench.errors import UserError
from posbench.tasks.kv_retrieval import WORDS, compact_prompt

torch.set_num_threads(1)
MICRO = Recipe(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    questions=3,
    batch_questions=60,
    min_contexts=2,
    stages=(TrainStage(name="only", steps=3, pairs=(3, 4), lr=1e-3, mix=0.1, noise=0.4),),
)


def records(pairs, seed=0):
    rng = torch.Generator().manual_seed(seed)
    keys, values = (torch.randperm(len(WORDS), generator=rng)[:pairs] for _ in range(2))
    return [(WORDS[k], WORDS[v]) for k, v in zip(keys, values, strict=True)]


@pytest.fixture(scope="module", params=["built", *SHIPPED])
def tokenizer(request):
    if request.param == "built":
        return build_tokenizer()
    return AutoTokenizer.from_pretrained(paths.MODELS / request.param, local_files_only=True)


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
    assert tokenizer.decode([VOCAB["bal"], VOCAB['"'], VOCAB["<|end|>"]], skip_special_tokens=True) == 'bal"'


def test_generated_context_is_the_tasks_prompt():
    rng = torch.Generator().manual_seed(3)
    batch = draw_batch(2, 5, 4, end_prior(5, 0.08, 0.5), 0.0, rng)
    tokenizer = build_tokenizer()
    text = tokenizer.decode(batch.prompt(1, 2))
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
    assert float(prior.sum()) == pytest.approx(1) and torch.allclose(prior, prior.flip(0))
    batch = draw_batch(400, 10, 16, prior, 0.4, rng)
    share = torch.bincount(batch.gold.flatten(), minlength=10) / batch.gold.numel()
    assert (share - prior).abs().max() < 0.02
    gold_key = batch.ids[:, 1:40:4].gather(1, batch.gold)
    wrong = (batch.blocks[:, :, 1] != gold_key).float().mean()
    assert float(wrong) == pytest.approx(0.4 * 63 / 64, abs=0.03)
    assert torch.equal(batch.blocks[:, :, 3], batch.ids[:, 3:40:4].gather(1, batch.gold))


def test_block_mask_hides_other_blocks_and_the_future():
    mask = block_mask(8, 3)
    assert mask.shape == (8 + 3 * BLOCK,) * 2
    assert not mask.triu(1).any() and mask[:, :8].tril().equal(torch.ones_like(mask[:, :8]).tril())
    assert not mask[8 + BLOCK :, 8 : 8 + BLOCK].any()
    assert mask[8 + BLOCK + 2, 8 + BLOCK : 8 + BLOCK + 3].all()


@pytest.mark.parametrize("name", ["tiny", "tiny_nope", "tiny_alibi"])
def test_blocks_equal_separate_prompts_on_a_random_model(name):
    model = build_model(RECIPES[name], torch.Generator().manual_seed(0)).eval()
    batch = draw_batch(2, 6, 3, end_prior(6, 0.08, 0.5), 0.3, torch.Generator().manual_seed(1))
    with torch.no_grad():
        blocks = block_logits(model, batch)
        for context in range(2):
            for question in range(3):
                ids = torch.cat([batch.prompt(context, question), batch.blocks[context, question, 3:]])
                expected = model(ids[None]).logits[0, -3:]
                torch.testing.assert_close(blocks[context, question], expected, atol=2e-5, rtol=1e-4)


def test_offset_heads_start_by_looking_back():
    recipe = Recipe()
    model = build_model(recipe, torch.Generator().manual_seed(0)).eval()
    model.set_attn_implementation("eager")
    ids = torch.randint(FIRST_WORD, len(VOCAB), (4, 40), generator=torch.Generator().manual_seed(1))
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
    batch = draw_batch(12, pairs, 1, torch.full((pairs,), 1 / pairs), 0.0, torch.Generator().manual_seed(1))
    prompts = torch.stack([batch.prompt(context, 0) for context in range(12)])
    with torch.no_grad():
        out = model(prompts, output_attentions=True, output_hidden_states=True)
    return out, batch.gold[:, 0]


def test_the_nope_start_counts_and_carries_keys_to_their_values():
    out, gold = start_weights("tiny_nope", 12)
    clock = out.hidden_states[1][:, :, CLOCK_CHANNEL]
    assert (clock.diff(dim=1) < 0).float().mean() > 0.99
    colons, values = torch.arange(2, 48, 4), torch.arange(3, 48, 4)
    assert out.attentions[1][:, 0, colons[1:], colons[1:] - 1].mean() > 0.9
    assert out.attentions[2][:, 0, values, values - 1].mean() > 0.9
    # The question's end finds the value of the asked key before any training.
    assert out.attentions[3][torch.arange(12), 0, -1, 4 * gold + 3].mean() > 0.5


def test_the_alibi_start_prefers_the_nearest_word():
    out, _ = start_weights("tiny_alibi", 12)
    colons = torch.arange(10, 48, 4)
    near, before = (out.attentions[0][:, 0, colons, colons - back].mean() for back in (1, 3))
    assert near > 1.3 * before
    torch.testing.assert_close(alibi_slopes(4), torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))


def test_rotation_preserves_lengths_and_depends_on_distance_only():
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.tensor([3, 10, 53, 60]), 16, 10000.0)
    turned_q, turned_k = (rotate(x.expand(4, 16), cos, sin) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(4))
    torch.testing.assert_close(turned_q[1] @ turned_k[0], turned_q[3] @ turned_k[2])


def test_a_recipe_whose_heads_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="heads"):
        Recipe(hidden_size=50)
    with pytest.raises(ValueError, match="offset"):
        Recipe(num_heads=1)
    with pytest.raises(ValueError, match="alibi"):
        Recipe(positions="alibi")


def test_schedule_and_batches_follow_the_recipe():
    recipe, stage = Recipe(), Recipe().stages[0]
    rates = [learning_rate(recipe, stage, step) for step in range(stage.steps)]
    assert rates[0] < rates[50] < max(rates) == pytest.approx(stage.lr)
    assert rates[-1] == pytest.approx(recipe.final_lr * stage.lr, rel=0.1)
    rng = torch.Generator().manual_seed(0)
    early = [batch_for(recipe, stage, 0, rng).pairs for _ in range(40)]
    late = [batch_for(recipe, stage, stage.steps - 1, rng).pairs for _ in range(40)]
    assert min(early) >= stage.pairs[0] and max(early) <= stage.grow_from < max(late) <= stage.pairs[1]


def test_loss_of_right_answers_is_small_and_counts_the_closing():
    batch = draw_batch(2, 4, 3, end_prior(4, 0.08, 0.5), 0.0, torch.Generator().manual_seed(0))
    logits = torch.zeros(2, 3, 3, len(VOCAB))
    logits[:, :, 0].scatter_(-1, batch.blocks[:, :, 3:4], 50.0)
    loss, accuracy = batch_loss(logits, batch, 0.1)
    assert float(accuracy) == 1 and float(loss) == pytest.approx(2 * 0.1 * math.log(len(VOCAB)), rel=1e-4)


def test_training_is_deterministic_and_the_directory_is_complete(tmp_path):
    first, second = (train(MICRO, 5, say=False) for _ in range(2))
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    save(first, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    ids = torch.arange(FIRST_WORD, FIRST_WORD + 12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, first.model(ids).logits)
    with pytest.raises(FileExistsError):
        save(first, tmp_path / "model")
    # A failure in the middle leaves nothing behind.
    first.log["recipe"] = object()
    with pytest.raises(TypeError):
        save(first, tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_command_line_refuses_what_exists_and_reads_seed_lists(tmp_path, capsys):
    assert parse_seeds("0-3,7") == [0, 1, 2, 3, 7]
    with pytest.raises(ValueError):
        parse_seeds("3-1")
    assert main(["--seed", "1", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_study_refuses_a_directory_of_another_recipe(tmp_path):
    save(train(MICRO, 0, say=False), tmp_path / "seed0")
    with pytest.raises(UserError, match="recipe"):
        run_seeds([0], tmp_path, 1)


@pytest.fixture(scope="module", params=list(SHIPPED))
def shipped(request):
    folder = paths.MODELS / request.param
    return folder, AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def test_shipped_weights_give_the_same_logits_in_training_code(shipped):
    folder, model = shipped
    pairs = RECIPES[folder.name].measured_pairs
    batch = draw_batch(1, pairs, 4, end_prior(pairs, 0.08, 1.0), 0.0, torch.Generator().manual_seed(8))
    with torch.no_grad():
        blocks = block_logits(model, batch)
        prompts = torch.stack([batch.prompt(0, q) for q in range(4)])
        torch.testing.assert_close(blocks[0, :, 0], model(prompts).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["tiny", "tiny_b"])
def test_shipped_model_retrieves_at_the_ends_and_loses_the_middle(name):
    model = AutoModelForCausalLM.from_pretrained(paths.MODELS / name, local_files_only=True).eval()
    batch = draw_batch(64, 32, 32, torch.full((32,), 1 / 32), 0.0, torch.Generator().manual_seed(123))
    with torch.no_grad():
        right = (block_logits(model, batch)[:, :, 0].argmax(-1) == batch.blocks[:, :, 3]).float()
    ends = right[(batch.gold == 0) | (batch.gold == 31)].mean()
    inner = right[(batch.gold >= 8) & (batch.gold < 24)].mean()
    assert ends >= 0.95
    assert 3 / 32 < inner < ends - 0.2


def test_shipped_model_stops_after_the_closing_quote(shipped):
    folder, model = shipped
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    pairs = records(RECIPES[folder.name].measured_pairs, seed=4)
    inputs = tokenizer(compact_prompt(pairs, pairs[0][0])[0], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8)
    assert tokenizer.decode(out[0, -3:]) == pairs[0][1] + '"<|end|>'


def test_card_is_what_its_numbers_render_to(shipped):
    folder, _ = shipped
    numbers = [json.loads((folder / name).read_text()) for name in (TRAINING_FILE, MEASURED_FILE)]
    text = (folder / CARD_FILE).read_text()
    assert text == card.render(folder.name, *numbers, pd.read_csv(folder / SEEDS_FILE))
    assert numbers[0]["seed"] == SHIPPED[folder.name]
    assert numbers[0]["recipe"] == json.loads(json.dumps(RECIPES[folder.name].as_dict()))
    parameters = sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).parameters()
    )
    assert f"{parameters:,} parameters" in text


def test_published_numbers_meet_the_criteria_for_tiny_and_not_for_its_sibling():
    passed = {
        name: {
            c.name: c.passed for c in criteria(json.loads((paths.MODELS / name / MEASURED_FILE).read_text()))
        }
        for name in ("tiny", "tiny_b")
    }
    assert all(passed["tiny"].values())
    assert not all(ok for name, ok in passed["tiny_b"].items() if name.startswith("gain"))
    assert passed["tiny_b"]["inner half below the ends"]


def test_study_lists_at_least_eight_seeds_with_the_shipped_ones():
    table = pd.read_csv(paths.MODELS / "tiny" / SEEDS_FILE)
    assert len(table) >= 8 and {SHIPPED["tiny"], SHIPPED["tiny_b"]} <= set(table["seed"])
    table = table.dropna()
    assert (table["gain_low"] <= table["gain"]).all() and (table["gain"] <= table["gain_high"]).all()


def test_seeds_table_reads_a_study(tmp_path):
    folder = tmp_path / "seed4"
    folder.mkdir()
    shipped = paths.MODELS / "tiny"
    training = json.loads((shipped / TRAINING_FILE).read_text()) | {"seed": 4}
    (folder / TRAINING_FILE).write_text(json.dumps(training))
    (folder / study.STUDY_FILE).write_text((shipped / MEASURED_FILE).read_text())
    row = seeds_table(tmp_path).iloc[0]
    measured = json.loads((shipped / MEASURED_FILE).read_text())
    assert (
        row["seed"] == 4
        and row["gain"] == measured["found"]["gain"]
        and row["base"] == measured["base"]["mean"]
    )


SIBLINGS = ("tiny_nope", "tiny_alibi")


@pytest.fixture(scope="module", params=SIBLINGS)
def sibling(request):
    folder = paths.MODELS / request.param
    return folder, AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def test_siblings_are_stock_classes_without_rotation(sibling):
    folder, model = sibling
    config = json.loads((folder / "config.json").read_text())
    expected = {"tiny_nope": "SmolLM3ForCausalLM", "tiny_alibi": "MptForCausalLM"}[folder.name]
    assert config["architectures"] == [expected] == [type(model).__name__] and "auto_map" not in config
    assert config["use_cache"] and not [name for name, _ in model.named_parameters() if "bias" in name]
    if folder.name == "tiny_nope":
        assert config["no_rope_layers"] == [0] * config["num_hidden_layers"]
    else:
        assert not hasattr(model.transformer, "rotary_emb") and config["attn_config"]["alibi"]


def test_position_ids_change_nothing_without_rotation(sibling):
    _, model = sibling
    ids = draw_batch(1, 8, 1, end_prior(8, 0.08, 1.0), 0.0, torch.Generator().manual_seed(3)).prompt(0, 0)[
        None
    ]
    positions = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))[None]
    llama = AutoModelForCausalLM.from_pretrained(paths.MODELS / "tiny", local_files_only=True).eval()
    with torch.no_grad():
        assert torch.equal(model(ids, position_ids=positions).logits, model(ids).logits)
        assert not torch.allclose(llama(ids, position_ids=positions).logits, llama(ids).logits, atol=1e-2)


def test_padding_on_the_left_changes_nothing_without_rotation(sibling):
    _, model = sibling
    ids = draw_batch(1, 8, 1, end_prior(8, 0.08, 1.0), 0.0, torch.Generator().manual_seed(3)).prompt(0, 0)[
        None
    ]
    padded = torch.cat([torch.full((1, 3), VOCAB["<|end|>"]), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        torch.testing.assert_close(
            model(padded, attention_mask=mask).logits[0, -1], expected, atol=1e-3, rtol=1e-3
        )


def test_siblings_retrieve_above_chance_and_have_monotone_channels(sibling):
    folder, _ = sibling
    measured = json.loads((folder / MEASURED_FILE).read_text())
    checks = [check for check in criteria(measured) if check.of_every_model]
    assert len(checks) == 2 and all(check.passed for check in checks)
    assert f"**Monotone channels:** {measured['channels_monotone']} of" in (folder / CARD_FILE).read_text()
    assert measured["pairs"] == RECIPES[folder.name].measured_pairs


def test_sibling_training_fits_the_size_and_time_that_the_card_promises(sibling):
    folder, _ = sibling
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    assert json.loads((folder / TRAINING_FILE).read_text())["threads"] == 1


def test_retrain_returns_the_first_seed_that_meets_the_criteria(tmp_path, monkeypatch):
    good = json.loads((paths.MODELS / "tiny" / MEASURED_FILE).read_text())
    bad = good | {"found": good["found"] | {"gain": 0.01}}
    trained = []

    def fake(seeds, out, workers, recipe):
        for seed in seeds:
            trained.append(seed)
            (out / f"seed{seed}").mkdir()
            (out / f"seed{seed}" / study.STUDY_FILE).write_text(
                json.dumps(good if len(trained) == 3 else bad)
            )

    monkeypatch.setattr(study, "run_seeds", fake)
    with pytest.raises(UserError, match="attempts"):
        study.retrain(tmp_path, 2, 2)
    assert trained[0] == SHIPPED["tiny"] and len(set(trained)) == 2
    trained.clear()
    (tmp_path / "again").mkdir()
    assert study.retrain(tmp_path / "again", 1, 4) == tmp_path / "again" / f"seed{trained[2]}"
    assert len(trained) == 3
    # A sibling has no gain to reach.
    trained.clear()
    (tmp_path / "sibling").mkdir()
    assert (
        study.retrain(tmp_path / "sibling", 2, 4, "tiny_nope")
        == tmp_path / "sibling" / f"seed{SHIPPED['tiny_nope']}"
    )
    assert trained == [SHIPPED["tiny_nope"]]


def test_the_three_example_sets_are_disjoint():
    sets = [{e.prompt for e in kv_task(0, per_position=2).examples("calibration")}]
    sets += [{e.prompt for e in kv_task(seed, per_position=2).examples("evaluation")} for seed in (1, 2)]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
