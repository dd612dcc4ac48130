"""docs/scale.md: its rows are the code's, its shapes the published ones, no experiment is left out."""

from pathlib import Path

import pytest

from posbench import paths
from posbench.errors import choices
from tools import scale
from tools.pages import between_marks

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
PUBLISHED = {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192}


def test_a_row_of_the_page_is_that_of_the_published_shapes() -> None:
    """Texts of random tokens: 1000 of 1024, in one forward each."""
    name = "behind_rope_fig5"
    cells = scale.row(name)
    assert f"| {' | '.join(cells)} |" in PAGE.read_text(), "python tools/scale.py"
    for model, parameters in PUBLISHED.items():
        assert scale.costs(model).parameters == parameters
    (work,) = scale.works(name, "7B")
    assert (work.tokens, work.computed_tokens, work.prompts) == (
        1_024_000,
        1_024_000,
        0,
    )
    body = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    pairs = 1000 * 1024 * 1025 / 2
    flops = 2 * body * 1_024_000 + 4 * 32 * 4096 * pairs
    assert scale.costs("7B").flops(work) == pytest.approx(flops, rel=1e-4)
    assert f"{flops / 1e15:.0f} PFLOP" in cells[3]


def test_no_experiment_of_the_papers_is_left_out() -> None:
    told = set(scale.SETTINGS["experiments"]) | {
        n for names in scale.SETTINGS["untold"] for n in names.split(", ")
    }
    every = set(choices(*paths.group_folders("experiment")))
    assert told <= every and every - told == {"liu2023", "remedies", "side_effects"}


def test_documents_that_move_share_what_stands_before_them() -> None:
    """Ten documents, the gold one at five places: of a prompt 1, 1, 0.8, 0.6 and 0.4 are new."""
    lm, (config,) = scale.outline("7B", 0.25), scale.configs("lpes_table1_mdqa")
    rows = [
        lm.encode(e.prompt).ids for e in config.task.evaluation() if e.cluster == "0"
    ]
    new = [
        len(row) - max((_common(row, other) for other in rows[:n]), default=0)
        for n, row in enumerate(rows)
    ]
    assert sum(new) / len(rows[0]) == pytest.approx(1 + 1 + 0.8 + 0.6 + 0.4, abs=0.15)


def _common(row: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(row, other, strict=False)) if a != b),
        len(row),
    )


HINT = "python tools/scale.py"


@pytest.mark.parametrize("experiment", ["lpes_fig5", "lpes_table2", "yu2025_fig12"])
def test_rows_of_the_page_are_the_codes(experiment: str) -> None:
    assert f"| {' | '.join(scale.row(experiment))} |\n" in PAGE.read_text(), HINT


@pytest.mark.slow
def test_the_page_is_the_code_s() -> None:
    assert between_marks(PAGE, "scale", scale.page()) == PAGE.read_text(), HINT
