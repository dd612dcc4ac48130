"""``posbench docs NAME``: pages of the documentation that are made from code or from runs."""

from __future__ import annotations

from posbench.errors import UserError


def docs(args: list[str]) -> int:
    """Write one page."""
    raise UserError("docs", " ".join(args), "families", "posbench docs families")
