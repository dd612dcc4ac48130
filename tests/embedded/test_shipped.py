"""What the shipped weights show, what their cards say, and what is stock about their classes."""

import json
from dataclasses import asdict

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posbench import paths
from posbench.embedded.criteria import criteria
from posbench.embedded.data import draw_batch, end_prior
from posbench.embedded.network import block_logits
from posbench.embedded.recipe import RECIPES, SHIPPED_SEEDS
from posbench.embedded.study import MEASURED_FILE, SEEDS_FILE
from posbench.embedded.tokenizer import VOCAB
from posbench.embedded.training import TRAINING_FILE
from posbench.tasks.kv_retrieval import compact_prompt
from tests.embedded.test_training import prompt, records
from tests.rounding import assert_same, noise_floor

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=list(SHIPPED_SEEDS))
def shipped(request):
    folder = paths.MODELS / request.param
    return folder, AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True
    ).eval()


def test_shipped_weights_give_the_same_logits_in_training_code(shipped):
    folder, model = shipped
    pairs = RECIPES[folder.name].measured_pairs
    batch = draw_batch(
        1, pairs, 4, end_prior(pairs, 0.08, 1.0), 0.0, torch.Generator().manual_seed(8)
    )
    with torch.no_grad():
        blocks = block_logits(model, batch)
        prompts = torch.stack([prompt(batch, 0, q) for q in range(4)])
        noise = noise_floor(model, prompts)
        assert_same(blocks[0, :, 0], model(prompts).logits[:, -1], noise, "logits")


@pytest.mark.parametrize("name", ["tiny", "tiny_b"])
def test_shipped_model_retrieves_at_the_ends_and_loses_the_middle(name):
    model = AutoModelForCausalLM.from_pretrained(
        paths.MODELS / name, local_files_only=True
    ).eval()
    batch = draw_batch(
        64, 32, 32, torch.full((32,), 1 / 32), 0.0, torch.Generator().manual_seed(123)
    )
    with torch.no_grad():
        right = (
            block_logits(model, batch)[:, :, 0].argmax(-1) == batch.blocks[:, :, 3]
        ).float()
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


def test_the_card_says_what_was_measured(shipped):
    folder, model = shipped
    log, measured = (
        json.loads((folder / name).read_text())
        for name in (TRAINING_FILE, MEASURED_FILE)
    )
    text = (folder / "README.md").read_text()
    base = measured["base"]
    assert log["seed"] == SHIPPED_SEEDS[folder.name]
    assert {**log["recipe"]} == json.loads(json.dumps(asdict(RECIPES[folder.name])))
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert f"{measured['n']} prompts with {measured['pairs']} pairs" in text
    shown = [f"{base[name]:.3f}" for name in ("first", "last", "inner", "lowest")]
    told = "First position {}, last position {}, inner half {}, lowest position {}."
    assert told.format(*shown) in text
    found = measured["found"]
    gain = "{:+.1f} [{:+.1f}, {:+.1f}]".format(
        *(100 * found[k] for k in ("gain", "gain_low", "gain_high"))
    )
    first, last = found["layers"]
    where = f"channel {found['channel']} \u00d7 {found['factor']:g} in layers {first}-{last}"
    assert f"{where}: {gain} points" in text
    rows = pd.read_csv(folder / SEEDS_FILE)
    for row in rows.to_dict("records"):
        numbers = " | ".join(
            f"{row[name]:.3f}" for name in ("base", "first", "last", "inner", "lowest")
        )
        assert f"{numbers} |" in text
    assert f"study.seeds=[{log['seed']}]" in text


def test_published_numbers_meet_the_criteria_for_tiny_and_not_for_its_sibling():
    passed = {}
    for name in ("tiny", "tiny_b"):
        measured = json.loads((paths.MODELS / name / MEASURED_FILE).read_text())
        passed[name] = {
            row["criterion"]: row["passed"] for row in criteria(measured, name)
        }
    assert all(passed["tiny"].values())
    assert not all(
        ok for name, ok in passed["tiny_b"].items() if name.startswith("gain")
    )
    assert passed["tiny_b"]["inner half below the ends"]


def test_study_lists_at_least_eight_seeds_with_the_shipped_ones():
    table = pd.read_csv(paths.MODELS / "tiny" / SEEDS_FILE)
    assert len(table) >= 8 and {SHIPPED_SEEDS["tiny"], SHIPPED_SEEDS["tiny_b"]} <= set(
        table["seed"]
    )
    table = table.dropna()
    assert (table["gain_ci_low"] <= table["gain"]).all() and (
        table["gain"] <= table["gain_ci_high"]
    ).all()


@pytest.fixture(scope="module", params=["tiny_nope", "tiny_alibi"])
def sibling(request):
    folder = paths.MODELS / request.param
    return folder, AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True
    ).eval()


def test_siblings_are_stock_classes_without_rotation(sibling):
    folder, model = sibling
    config = json.loads((folder / "config.json").read_text())
    expected = {"tiny_nope": "SmolLM3ForCausalLM", "tiny_alibi": "MptForCausalLM"}[
        folder.name
    ]
    assert (
        config["architectures"] == [expected] == [type(model).__name__]
        and "auto_map" not in config
    )
    assert config["use_cache"] and not [
        name for name, _ in model.named_parameters() if "bias" in name
    ]
    if folder.name == "tiny_nope":
        assert config["no_rope_layers"] == [0] * config["num_hidden_layers"]
    else:
        assert (
            not hasattr(model.transformer, "rotary_emb")
            and config["attn_config"]["alibi"]
        )


def test_position_ids_change_nothing_without_rotation(sibling):
    _, model = sibling
    ids = prompt(
        draw_batch(
            1, 8, 1, end_prior(8, 0.08, 1.0), 0.0, torch.Generator().manual_seed(3)
        ),
        0,
        0,
    )[None]
    positions = torch.randperm(
        ids.shape[1], generator=torch.Generator().manual_seed(0)
    )[None]
    llama = AutoModelForCausalLM.from_pretrained(
        paths.MODELS / "tiny", local_files_only=True
    ).eval()
    with torch.no_grad():
        assert torch.equal(model(ids, position_ids=positions).logits, model(ids).logits)
        assert not torch.allclose(
            llama(ids, position_ids=positions).logits, llama(ids).logits, atol=1e-2
        )


def test_padding_on_the_left_changes_nothing_without_rotation(sibling):
    _, model = sibling
    ids = prompt(
        draw_batch(
            1, 8, 1, end_prior(8, 0.08, 1.0), 0.0, torch.Generator().manual_seed(3)
        ),
        0,
        0,
    )[None]
    padded = torch.cat([torch.full((1, 3), VOCAB["<|end|>"]), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        found = model(padded, attention_mask=mask).logits[0, -1]
    assert_same(found, expected, noise_floor(model, ids), "logits")


def test_siblings_retrieve_above_chance_and_have_monotone_channels(sibling):
    folder, _ = sibling
    measured = json.loads((folder / MEASURED_FILE).read_text())
    passed = [
        row["passed"] for row in criteria(measured, folder.name) if row["required"]
    ]
    assert passed == [True, True]
    assert (
        f"**Monotone channels:** {measured['channels_monotone']} of"
        in (folder / "README.md").read_text()
    )
    assert measured["pairs"] == RECIPES[folder.name].measured_pairs


def test_sibling_training_fits_the_size_and_time_that_the_card_promises(sibling):
    folder, _ = sibling
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    assert json.loads((folder / TRAINING_FILE).read_text())["threads"] == 1
