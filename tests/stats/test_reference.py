"""The papers' numbers arrive in our names, and a name that the table lacks is refused."""

from dataclasses import replace

import pytest
import yaml

from posbench import paths
from posbench.errors import UserError
from posbench.schema import build
from posbench.stats.reference import Reference, table


def _of(experiment: str) -> Reference:
    data = yaml.safe_load((paths.EXPERIMENTS / f"{experiment}.yaml").read_text())
    return build(Reference, data["experiment"]["reference"], "experiment.reference")


@pytest.fixture
def reference() -> Reference:
    return _of("yu2025_table1_kv")


def test_rows_of_table_1(reference):
    cells = {(r["model"], r["method"], r["gold_position"]): r["value"] for r in reference.rows()}
    # Typed off Table 1 of the paper, not off the CSV.
    assert cells["llama2_7b", "none", "25%"] == pytest.approx(0.246)
    assert cells["llama2_7b", "scale_channel", "all"] == pytest.approx(0.638)
    assert cells["vicuna_7b_16k", "none", "0%"] == pytest.approx(0.984)
    assert cells["llama2_13b", "scale_channel", "all"] == pytest.approx(0.539)
    assert len(cells) == 8 * 2 * 6
    assert {r["metric"] for r in reference.rows()} == {"accuracy"}


def test_a_table_of_several_tasks():
    rows = _of("yu2025_table3").rows()
    cells = {(r["model"], r["method"], r["task"], r["metric"]): r["value"] for r in rows}
    assert len(rows) == len(cells) == 3 * 2 * 2 and {r["gold_position"] for r in rows} == {"all"}
    # Typed off Table 3 of the paper.
    assert cells["qwen1_5_7b", "scale_channel", "mmlu", "accuracy"] == pytest.approx(0.6143)
    assert cells["mistral7b", "none", "loogle_timeline_reorder", "exact_order"] == pytest.approx(0.1875)
    # Tables 4 and 2 of LPES; data sets of a benchmark stand in the place of a position.
    lpes = {(r["model"], r["method"], r["task"]): r["value"] for r in _of("lpes_table4").rows()}
    assert len(lpes) == 8 and lpes["stablebeluga_7b", "none", "ceval"] == pytest.approx(0.3478)
    assert lpes["vicuna_7b", "layer_scaling", "mmlu"] == pytest.approx(0.49)
    rows = _of("lpes_table2").rows()
    subsets = {(r["model"], r["method"], r["gold_position"]): r["value"] for r in rows}
    assert subsets["vicuna_7b", "none", "gov_report"] == pytest.approx(0.1844)
    assert subsets["vicuna_7b", "none", "all"] == pytest.approx(0.1691)
    assert {r["task"] for r in rows} == {"zero_scrolls"}


def test_a_table_at_every_tenth_of_the_prompt():
    cells = {(r["model"], r["method"], r["gold_position"]): r["value"] for r in _of("lpes_table16").rows()}
    assert len(cells) == 2 * 12
    # Typed off Table 16 of LPES.
    assert cells["vicuna_13b", "layer_scaling", "20%"] == pytest.approx(0.694)
    assert cells["vicuna_13b", "none", "all"] == pytest.approx(0.651)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("models", {"Mistral-7B": "mistral7b"}, "Mistral-7B"),
        ("methods", {"Original": "none", "Yours": "x"}, "Yours"),
        ("positions", {"Average": "all"}, "Average"),
        ("paper_task", "KV-retrieval-75pairs", "KV-retrieval-75pairs"),
        ("further_tasks", {"KV-retrieval-75pairs": "kv"}, "further_tasks = 'KV-retrieval-75pairs'"),
        ("file", "absent.csv", "absent.csv"),
    ],
)
def test_a_name_that_the_table_lacks_is_refused(reference, field, value, named):
    with pytest.raises(UserError, match=named):
        replace(reference, **{field: value}).rows()


def test_a_table_is_read_as_printed_and_must_have_its_columns():
    printed = table("yu2025_table4_parameters.csv", "model", "value")
    assert "1,081" in set(printed["value"]) and printed.map(type).eq(str).all().all()
    with pytest.raises(UserError, match=r"absent\.csv.*columns model"):
        table("absent.csv", "model")
    with pytest.raises(UserError, match="columns model, nonsense"):
        table("yu2025_table4_parameters.csv", "model", "nonsense")
