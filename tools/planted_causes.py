"""Planted causes: does a diagnosis name the source of a bias where it is known?

python tools/planted_causes.py DIR    trains the models into DIR (hours on one core; goes on where it was killed),
                                      diagnoses each, and writes the table of experiments/results/diagnose.md
python tools/planted_causes.py DIR --seeds 0,1 --kinds decay,none    some of them; writes nothing

Each kind of model has a position bias, or none, for a reason that its making settles (KINDS below).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import posbench as library
from posbench import paths
from posbench.cli.main import main as posbench
from posbench.embedded.recipe import RECIPES, Recipe
from posbench.embedded.training import save, train
from posbench.files.atomic import write_csv, write_text
from posbench.files.markdown import markdown
from posbench.late import pd, torch
from posbench.measure.items import attention_to_items, item_tokens
from posbench.model.encode import Encoded
from posbench.model.lm import LM
from posbench.stats.bootstrap import wilson
from posbench.stats.verdict import BIAS, FIXED, NOT_FIXED
from posbench.studies.bias_source import MASK, POSITION_IDS
from posbench.tasks import Example, KVRetrieval
from tools.pages import between_marks

PAGE = paths.EXPERIMENTS / "results" / "diagnose.md"
SEEDS = range(10)
ROPE_STEPS = 1000
NOPE_STEPS = 1200
NOPE_RATE = 5e-4
"""Steps and learning rate with which questions about all places are learned; at 1e-3 three of five seeds without
position embedding learn nothing."""
DECAY_PAIR = 3
"""Rotary pair of the planted decay: 0.03 radians a token, so that half a turn is about 100 tokens."""
VALUE_TOKEN = 3
"""Token of an item that holds its value: the item is separator, key, colon, value, separator."""
DECAY_LOGIT = 16.0
"""What the planted term adds to a score at distance 0."""


@dataclass(frozen=True)
class Kind:
    """How a model is made, and what a diagnosis must say of it.

    Attributes:
        about: What it is, for the page.
        recipe: Its recipe.
        pairs: Pairs of a prompt when it is asked.
        sources: What must be named; empty where there is no bias.
        plants_decay: Whether a term that falls with the distance is added after training.
    """

    about: str
    recipe: Recipe
    pairs: int
    sources: frozenset[str] = frozenset()
    plants_decay: bool = False


def _unbiased(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with questions about all places alike, and none with a wrong key."""
    stage = replace(recipe.stages[0], mix=1.0, noise=0.0, uniform_until=1.0, **changes)
    return replace(recipe, stages=(stage,))


ROPE = _unbiased(RECIPES["tiny"], steps=ROPE_STEPS)
NOPE = _unbiased(RECIPES["tiny_nope"], steps=NOPE_STEPS, lr=NOPE_RATE)
KINDS = {
    "data": Kind(
        "RoPE and causal mask, trained on questions that mostly ask for the ends of the list",
        RECIPES["tiny"],
        32,
        frozenset({MASK, POSITION_IDS}),
    ),
    "mask": Kind(
        "no position embedding, trained on questions about all places of up to 16 pairs, asked with 32",
        NOPE,
        32,
        frozenset({MASK}),
    ),
    "decay": Kind(
        "RoPE and causal mask, trained on questions about all places; then a term that falls with the distance "
        "is added to the scores of the layer that retrieves",
        ROPE,
        32,
        frozenset({POSITION_IDS}),
        plants_decay=True,
    ),
    "none": Kind("as decay, without that term", ROPE, 32),
    "none_nope": Kind("as mask, asked with 16", NOPE, 16),
}


# Making models


def make_model(kind: Kind, seed: int, folder: Path) -> Path:
    """Train a model, or take the one that is there; return its folder."""
    torch.set_num_threads(1)
    trained = folder / f"{kind.recipe.positions}-{len(kind.recipe.stages)}-{seed}"
    if not trained.is_dir():
        checkpoint = trained.with_suffix(".pt")
        model, log = train(kind.recipe, seed, checkpoint)
        save(model, log, trained)
        checkpoint.unlink()
    if not kind.plants_decay:
        return trained
    planted = folder / f"decay-{seed}"
    if not planted.is_dir():
        work = folder / f".decay-{seed}"
        shutil.copytree(trained, work, dirs_exist_ok=True)
        lm = library.load(str(trained))
        plant_decay(lm)
        lm.model.save_pretrained(work)
        work.rename(planted)
    return planted


def plant_decay(lm: LM) -> None:
    """Add logit * cos(theta distance) to the scores of values in the layer that retrieves, in place.

    Query and key get a number in one rotary pair of each head: a linear map of the layer's input that is about 1 for
    the last token (query) and for values (key) and 0 for all others, fitted by least squares. The rotation turns their
    product into the cosine of the distance.
    """
    task = KVRetrieval(
        pairs=32, prompt="compact", records="words", limit=40, max_new_tokens=1
    )
    examples = task.evaluation()
    encoded = [lm.encode(example.prompt) for example in examples]
    index = _retrieving_layer(lm, encoded, examples)
    layer = lm.model.model.layers[index]
    ids = torch.tensor([prompt.ids for prompt in encoded])  # all of one length
    with torch.no_grad():
        hidden = lm.model(ids, output_hidden_states=True).hidden_states[index]
        normed = layer.input_layernorm(hidden)  # [B, T, D]
    is_value = torch.zeros(ids.shape)
    is_last = torch.zeros(ids.shape)
    is_last[:, -1] = 1
    for row, (prompt, example) in enumerate(zip(encoded, examples, strict=True)):
        for start, _ in item_tokens(prompt, example):
            is_value[row, start + VALUE_TOKEN] = 1
    head_dim = layer.self_attn.head_dim
    amplitude = (DECAY_LOGIT * head_dim**0.5) ** 0.5
    for projection, marks in (
        (layer.self_attn.q_proj, is_last),
        (layer.self_attn.k_proj, is_value),
    ):
        fitted = torch.linalg.lstsq(normed.flatten(0, 1), marks.flatten()[:, None])
        with torch.no_grad():
            for row in range(DECAY_PAIR, projection.weight.shape[0], head_dim):
                projection.weight[row] += amplitude * fitted.solution[:, 0]


def _retrieving_layer(
    lm: LM, encoded: Sequence[Encoded], examples: Sequence[Example]
) -> int:
    """The layer whose last token attends most to the gold item."""
    attention = attention_to_items(lm, encoded, examples)  # [B, L, N]
    gold = [int(example.gold_position or 0) for example in examples]
    by_layer = torch.stack(
        [row[:, item] for row, item in zip(attention, gold, strict=True)]
    )
    return int(by_layer.mean(0).argmax())


# Diagnoses


def diagnose(kind: Kind, model: Path, outputs: Path) -> dict[str, Any]:
    """Diagnose a model as its user would; return what diagnosis.json says."""
    settings = {
        "model": model,
        "model.dtype": "float32",
        "model.threads": 1,
        "model.chat_template": "none",
        "task.prompt": "compact",
        "task.records": "words",
        "task.pairs": kind.pairs,
        "task.calibration_pairs": kind.pairs,
        "task.positions": "[0%,12.5%,25%,37.5%,50%,62.5%,75%,87.5%,100%]",
        "task.max_new_tokens": 1,
        "runtime.outputs": outputs,
        "budget": "3min",
    }
    args = [f"{key}={value}" for key, value in settings.items()]
    before = set(outputs.glob("diagnose/*/diagnosis.json"))
    if posbench(["diagnose", *args]):
        raise SystemExit(f"the diagnosis of {model} failed")
    (file,) = set(outputs.glob("diagnose/*/diagnosis.json")) - before
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make, diagnose, count, and write the page where all were diagnosed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.kinds.split(","):
        kind = KINDS[name]
        for seed in map(int, options.seeds.split(",")):
            model = make_model(kind, seed, options.folder)
            outputs = options.folder / "diagnoses" / f"{name}-{seed}"
            shutil.rmtree(outputs, ignore_errors=True)
            found = diagnose(kind, model, outputs)
            rows.append(_row(name, kind, seed, found))
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    write_csv(options.folder / "planted_causes.csv", table)
    print(table_of_kinds(table))
    is_whole = options.seeds == parser.get_default(
        "seeds"
    ) and options.kinds == parser.get_default("kinds")
    if is_whole:
        write_text(PAGE, between_marks(PAGE, "planted causes", table_of_kinds(table)))
    return 0


def table_of_kinds(table: pd.DataFrame) -> str:
    """A row for each kind: what its models were said to have, and how often that is right.

    Args:
        table: A row for each model, see :func:`_row`.
    """
    rows = []
    for name, models in table.groupby("kind", sort=False):
        kind = KINDS[name]
        count = len(models)
        wanted = " and ".join(sorted(kind.sources)) or "no bias"
        named = models["named"].where(models["named"] != "", "none")
        said = ", ".join(f"{n} {text}" for text, n in named.value_counts().items())
        right = int(models["right"].sum())
        low, high = wilson(right, count)
        interval = f"{right} of {count} [{100 * low:.0f}, {100 * high:.0f} %]"
        alarms = int(models["false_alarm"].sum())
        rows.append([name, kind.about, wanted, said, interval, f"{alarms} of {count}"])
    header = [
        "kind",
        "how the models are made",
        "what is true",
        "sources named",
        "right",
        "something false named",
    ]
    return markdown(header, rows)


def _row(name: str, kind: Kind, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """What a diagnosis said of a model, and whether that is right."""
    source = found["source"] or {}
    named = frozenset(source.get("named", ()))
    shape = (found["shape"] or {}).get("name", "")
    has_bias = found["verdict"] in (BIAS, FIXED, NOT_FIXED)
    return {
        "kind": name,
        "seed": seed,
        "verdict": found["verdict"],
        "shape": shape,
        "named": " and ".join(sorted(named)),
        "right": named == kind.sources and has_bias == bool(kind.sources),
        "false_alarm": bool(named - kind.sources) or (has_bias and not kind.sources),
    }


if __name__ == "__main__":
    sys.exit(main())
