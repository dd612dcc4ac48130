"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [_line(header), "|" + " --- |" * len(header)]
    for row in rows:
        lines.append(_line([str(cell).replace("|", "\\|") for cell in row]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
