"""`posbench model=DIR` on a random checkpoint of every family, through every stage."""

import json

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


FAMILIES = {families.family_of(build(name)).name: name for name in reversed(BUILDERS)}
"""One model of every family, the first of ``BUILDERS``."""


def test_every_family_is_here():
    assert set(FAMILIES) == {family.name for family in families.FAMILIES}


@pytest.mark.parametrize("name", list(reversed(FAMILIES.values())))
def test_every_stage_runs_on_a_checkpoint_of_the_family(
    name, tmp_path, posbench, small, outputs
):
    folder = tmp_path / name
    model = build(name)
    model.save_pretrained(folder)
    _tokenizer(model.config.model_type).save_pretrained(folder)
    own = [
        o
        for o in small
        if not o.startswith(
            ("model=", "model.path=", "model.name=", "search=", "stages=")
        )
    ]
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
    metrics = pd.read_csv(run / "metrics.csv")
    assert set(metrics["method"]) == {"none", "scale_channel"} and set(
        metrics["model"]
    ) == {name}
    method = json.loads((run / "method.json").read_text())
    assert method["layers"] == [1, 2]
