"""What scripts may rely on does not disappear unnoticed; new names need no list."""

from __future__ import annotations

from tests import public_names

GONE = """
gone from posbench, but listed in tests/data/public_names.txt. If that is meant, CHANGELOG.md has a line, and
`python -m tests.public_names` writes the list:
"""


def test_every_listed_name_is_still_there() -> None:
    gone = sorted(public_names.listed() - public_names.public_names())
    assert not gone, "\n".join([GONE, *gone])
