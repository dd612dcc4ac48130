"""The papers' numbers arrive in our names, and a name that the table lacks is refused."""

from dataclasses import replace

import pytest
import yaml

from posbench import paths
from posbench.errors import UserError
from posbench.reference import Reference
from posbench.schema import build


@pytest.fixture
def reference() -> Reference:
    data = yaml.safe_load((paths.EXPERIMENTS / "yu2025_table1_kv.yaml").read_text())
    return build(Reference, data["experiment"]["reference"], "experiment.reference")


def test_rows_of_table_1(reference):
    cells = {(r["model"], r["method"], r["position"]): r["value"] for r in reference.rows()}
    # Typed off Table 1 of the paper, not off the CSV.
    assert cells["llama2_7b", "none", "25%"] == pytest.approx(0.246)
    assert cells["llama2_7b", "scale_channel", "all"] == pytest.approx(0.638)
    assert cells["vicuna_7b_16k", "none", "0%"] == pytest.approx(0.984)
    assert cells["llama2_13b", "scale_channel", "all"] == pytest.approx(0.539)
    assert len(cells) == 8 * 2 * 6
    assert {r["metric"] for r in reference.rows()} == {"accuracy"}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("models", {"Mistral-7B": "mistral7b"}, "Mistral-7B"),
        ("methods", {"Original": "none", "Yours": "x"}, "Yours"),
        ("positions", {"Average": "all"}, "Average"),
        ("paper_task", "KV-retrieval-75pairs", "KV-retrieval-75pairs"),
        ("file", "absent.csv", "absent.csv"),
    ],
)
def test_a_name_that_the_table_lacks_is_refused(reference, field, value, named):
    with pytest.raises(UserError, match=named):
        replace(reference, **{field: value}).rows()
