"""`posbench model=DIR` on a random checkpoint of every family, through every stage."""

import json
from pathlib import Path

import pandas as pd
import pytest

from posbench.model import families
from tests.conftest import run_folders
from tests.models import BUILDERS, LAYERS, build


def _tokenizer(model_type: str):
    from transformers import Qwen2Tokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from posbench.embedded.tokenizer import build_tokenizer

    if model_type != "qwen2":
        return build_tokenizer()
    # Transformers reads every qwen2 checkpoint with its own byte-level splitting, whatever tokenizer.json
    # says.
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    return Qwen2Tokenizer(vocab=letters | {"<|endoftext|>": len(letters)}, merges=[])


def _checkpoint(name: str, folder: Path) -> Path:
    """A random checkpoint of that model, written to the folder."""
    model = build(name)
    model.save_pretrained(folder)
    _tokenizer(model.config.model_type).save_pretrained(folder)
    return folder


FEW = ["task.limit=4", "task.calibration_examples=4", "runtime.resamples=100"]


def _settings(small: list[str]) -> list[str]:
    """The small run without its model, search and stages, with fewer prompts."""
    replaced = ("model=", "model.path=", "model.name=", "search=", "stages=")
    own = [override for override in small if not override.startswith(replaced)]
    return [*own, *FEW]


MODELS = {build(name).config.model_type: name for name in reversed(BUILDERS)}
"""A model of every documented ``model_type``, the first of ``BUILDERS``."""


def test_every_documented_model_type_is_here():
    documented = {kind for family in families.FAMILIES for kind in family.model_types}
    assert set(MODELS) == documented


FIRST_OF_TYPE = list(reversed(MODELS.values()))
VARIANTS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in BUILDERS
    if name not in FIRST_OF_TYPE
]


@pytest.mark.parametrize("name", [*FIRST_OF_TYPE, *VARIANTS])
def test_every_stage_runs_on_a_checkpoint_of_the_family(
    name, tmp_path, posbench, small, outputs
):
    folder = _checkpoint(name, tmp_path / name)
    own = _settings(small)
    # One family goes through all that is the default; the report reads files alone, and a typed channel is
    # cheaper than ten.
    alone = name == "llama"
    typed = [] if alone else ["method.channel=5", "stages=[search,intervene,evaluate]"]
    result = posbench(f"model={folder}", *own, "search.layers=[1,2]", *typed)
    assert result.status == 0, result.err + result.out
    (run,) = run_folders(outputs)
    assert (run / "DONE").is_file() and (run / "report.html").is_file() == alone
    attention = pd.read_csv(run / "attention.csv")
    assert attention["layer"].nunique() == LAYERS
    assert attention["attention"].between(0, 1).all()
    gold = attention[attention["item"] == attention["gold_position"]]
    low, high = gold["attention_ci_low"], gold["attention_ci_high"]
    assert gold["attention"].between(low, high).all()
    # A window of the newest tokens gives an item before it exactly nothing.
    assert ((low < high) | (gold["attention"] == 0)).all() and (low >= 0).all()
    assert attention.drop(gold.index)["attention_ci_low"].isna().all()
    metrics = pd.read_csv(run / "metrics.csv")
    assert set(metrics["method"]) == {"none", "scale_channel"} and set(
        metrics["model"]
    ) == {name}
    method = json.loads((run / "method.json").read_text())
    assert method["layers"] == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_run_in_every_dtype(name, dtype, tmp_path, posbench, small):
    """transformers' fast kernels of experts know some dtypes on some devices alone; the estimate's is "meta"."""
    folder = _checkpoint(name, tmp_path / name)
    command = [
        f"model={folder}",
        *(o for o in _settings(small) if not o.startswith("model.dtype=")),
        f"model.dtype={dtype}",
        "method=none",
        "stages=[evaluate]",
    ]
    valid = posbench("validate", *command)
    assert valid.status == 0, valid.err
    assert "parameters" in valid.out
    result = posbench(*command)
    assert result.status == 0, result.err


@pytest.mark.parametrize("reads_clock", [True, False])
def test_a_template_that_reads_the_clock_is_told(
    reads_clock, tmp_path, posbench, outputs
):
    folder = _checkpoint("qwen2", tmp_path / "dated")
    date = "{{ strftime_now('%d %b %Y') }}" if reads_clock else "26 Jul 2024"
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"Today: {date}. {shown}")
    command = [
        f"model={folder}",
        "method=none",
        "task.pairs=4",
        "task.positions=[0,1,3]",
        "task.limit=2",
        "task.max_new_tokens=1",
        "runtime.device=cpu",
        "runtime.threads=1",
        "runtime.resamples=100",
        "stages=[evaluate,report]",
    ]
    valid = posbench("validate", *command)
    result = posbench(*command)
    assert result.status == 0, result.err
    (run,) = run_folders(outputs)
    page = (run / "report.html").read_text()
    for text in (valid.out + valid.err, result.out + result.err, page):
        assert ("template reads the clock" in " ".join(text.split())) == reads_clock
