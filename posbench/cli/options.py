"""Options of verbs."""

from __future__ import annotations

from collections.abc import Sequence


def option(args: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of ``flag VALUE`` or ``flag=VALUE``, None where it is absent, and the other arguments."""
    parts = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    at = parts.index(flag) if flag in parts[:-1] else None
    return (None, parts) if at is None else (parts[at + 1], parts[:at] + parts[at + 2 :])
