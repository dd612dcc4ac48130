"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    told = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([*lines, *(f"| {cells} |" for cells in told)])
