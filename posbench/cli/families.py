"""Writes the support table of a README from the family table: ``make docs``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from posbench.files.atomic import write_text
from posbench.files.markdown import markdown
from posbench.model.families import support_table

MARKS = ("<!-- families -->", "<!-- /families -->")


def with_support_table(text: str) -> str:
    """A README's text with the part between the two marks made anew.

    Raises:
        ValueError: The marks are missing.
    """
    first, last = map(re.escape, MARKS)
    body = f"{MARKS[0]}\n\n{markdown(*support_table())}\n\n{MARKS[1]}"
    new, count = re.subn(f"{first}.*?{last}", lambda _: body, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"one pair of {MARKS[0]} {MARKS[1]} is needed, found {count}")
    return new


def main() -> None:
    """Rewrite the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readme", type=Path)
    readme = parser.parse_args().readme
    write_text(readme, with_support_table(readme.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
