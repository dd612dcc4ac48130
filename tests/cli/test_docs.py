"""What the documentation says of the code is what the code says."""

from pathlib import Path

import pytest

from posbench.cli.families import with_support_table
from posbench.model.families import FAMILIES

README = Path(__file__).parents[2] / "README.md"


def test_the_support_table_is_the_family_table():
    text = README.read_text()
    assert with_support_table(text) == text, "run make docs"
    for family in FAMILIES:
        assert family.name in text
    assert f"| families | {len(FAMILIES)}, see" in text


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="families"):
        with_support_table("# posbench\n")
