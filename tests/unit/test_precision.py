"""The precision study: its arithmetic by hand, and an ordering that rounding must keep."""

import torch

from posbench import paths
from posbench.errors import choices
from posbench.studies.cost.precision import compare, measure


def test_compare_by_hand():
    reference = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = torch.tensor([[0.5, 0.0], [2.0, 0.0]])
    assert compare(found, reference) == {"largest": 1.0, "mean": 1.5 / 4, "changed": 0.5}
    assert compare(reference, reference) == {"largest": 0.0, "mean": 0.0, "changed": 0.0}


def test_every_method_is_measured_and_fewer_bits_mean_larger_errors():
    errors, drifts = measure("tiny", 12, "cpu")
    largest = {(row[0], row[1]): float(row[2]) for row in errors}
    methods = choices(paths.CONF / "method")
    for name in methods:
        assert 0 < largest[name, "float32"] < largest[name, "float16"] < largest[name, "bfloat16"]
        assert largest[name, "float32"] < 1e-4
    assert largest["scale_channel - none", "float64"] > 1
    assert {row[0] for row in drifts} == set(methods)
    assert all(float(row[3]) < 1e-4 for row in drifts if row[1] == "float32")
