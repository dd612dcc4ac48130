"""The study of the LPES search runs, and its tables hold the paper's numbers as printed."""

from dataclasses import replace

import pytest

import posbench
from posbench.search import GeneticSearch
from posbench.studies.cost.precision import task_of
from posbench.studies.lpes import lpes


def test_the_papers_averages_are_read_as_printed():
    # Typed off the paper's tables.
    assert lpes.paper("table6_curve_types")["LPES (Step function)"] == "62.16"
    assert lpes.paper("table7_control_points", "")["5"] == "63.8"
    assert lpes.paper("table15_lambda")["<0.2, 0.3, 0.5>"] == "63.2"


@pytest.mark.slow
def test_every_table_is_made_and_the_searches_share_what_they_know():
    task = replace(task_of("tiny"), calibration_examples=2, examples_per_position=2)
    search = GeneticSearch(step_x=0.5, generations=1, population=4, parents=2, mutations=2, crossovers=1)
    bench = lpes.Bench(posbench.load("tiny"), task, search)
    text, courses = lpes.measure(bench, seeds=1)
    assert text.count("| unmodified |") == 6 and "nan" not in text
    assert set(courses["search"]) == {"no curve", "1", "2", "3", "4", "5", "4, x in any order"}
    again = bench.run()
    assert again[2] == 0  # the same search asks nothing twice
