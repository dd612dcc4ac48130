"""The benchmark runs every method that applies, and its ratios are those of the seconds."""

import pytest

import posbench
from posbench import paths
from posbench.studies.cost.latency import PAPERS, all_methods, generation, ratios
from tests.models import build

NAMES = {file.stem for file in (paths.CONF / "method").glob("*.yaml")} - {"none"}


def test_every_method_is_measured_where_it_applies():
    assert set(all_methods(posbench.load(build("llama")))) == NAMES | {"unmodified"}
    assert set(all_methods(posbench.load(build("mpt")))) == {"unmodified", "scale_channel"}
    assert next(iter(all_methods(posbench.load(build("llama"))))) == "unmodified"
    assert set(PAPERS) - {"ms_poe", "moice"} <= NAMES


def test_rows_of_a_measurement():
    ticks = iter([0.0, 1.0] * 2 + [0.0, 2.0, 0.0, 3.0] + [0.0, 4.0, 0.0, 4.0])
    lm = posbench.load(build("llama"))
    methods = {name: all_methods(lm)[name] for name in ("unmodified", "attention_buckets")}
    rows = generation(lm, methods, tokens=8, new_tokens=2, repeats=2, clock=lambda: next(ticks))
    assert rows == [
        ["8 + 2 tokens", "unmodified", "3.000", "1.000 (1.000 to 1.000)", ""],
        ["8 + 2 tokens", "attention_buckets", "3.500", "1.250 (1.000 to 1.500)", PAPERS["attention_buckets"]],
    ]


def test_ratios_are_taken_round_by_round():
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == "2.000 (1.000 to 3.000)"
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])
