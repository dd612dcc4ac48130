"""The ablations of LPES as experiments: ordinary runs whose rows differ in one key."""

import pytest

from posbench.pipeline.compose import compose
from posbench.search.scales import calibration_questions
from posbench.stats import reference
from posbench.tasks import KVRetrieval


def test_the_papers_averages_are_read_as_printed():
    # Typed off the paper's tables.
    for file, method, printed in (
        ("lpes_table6_curve_types.csv", "LPES (Step function)", "62.16"),
        ("lpes_table7_control_points.csv", "5", "63.8"),
        ("lpes_table15_lambda.csv", "<0.2, 0.3, 0.5>", "63.2"),
    ):
        table = reference.read_table(file)
        mean = table["metric"].str.startswith("accuracy(%)") & table["position"].isin(
            ["", "Average"]
        )
        assert table[mean & (table["method"] == method)]["value"].tolist() == [printed]


def test_table_7_varies_points_and_curve_and_leaves_the_rest():
    found = []
    told = []

    overrides = ["experiment=lpes_table7", "search.generations=2"]
    for each in compose(overrides).composed:
        found.append(each.raw["search"])
        own = each.raw["experiment"]["reference"]
        told.append(list(own["variants"].get(own["variant"], [])))

    assert told == [
        ["Brute-Force"],
        [],
        ["2"],
        ["3"],
        ["4"],
        ["5"],
        [],
    ]  # rows of the paper
    rows = [(each["curve"], each["points"], each["constrained"]) for each in found]
    assert rows[0] == ("free", 4, True) and rows[-1] == ("bezier", 4, False)
    assert rows[1:-1] == [("bezier", points, True) for points in (1, 2, 3, 4, 5)]
    # The model's own block still counts, and so does what the user types.
    assert {(each["step_x"], each["generations"]) for each in found} == {(0.5, 2)}


def test_table_8_draws_other_questions_and_evaluates_on_the_same():
    found = [job.raw for job in compose(["experiment=lpes_table8"]).composed]
    seeds = [raw["search"]["calibration_seed"] for raw in found]
    assert seeds == [0, 1, 2, 3, 4]
    assert all(raw["task"] == found[0]["task"] for raw in found)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_calibration_seed_is_that_of_the_task(seed: int):
    given = dict(
        prompt="compact",
        records="words",
        pairs=8,
        calibration_pairs=8,
        calibration_examples=3,
    )
    asked = calibration_questions(KVRetrieval(**given), seed)
    assert asked == calibration_questions(KVRetrieval(**given, seed=seed))
    assert (asked == calibration_questions(KVRetrieval(**given))) == (seed == 0)
