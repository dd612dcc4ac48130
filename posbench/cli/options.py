"""Options of verbs."""

from __future__ import annotations

from collections.abc import Sequence

from posbench.errors import UserError


def option(args: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of ``flag VALUE`` or ``flag=VALUE``, None where it is absent, and the other arguments.

    Raises:
        UserError: It has no value, or stands twice.
    """
    parts = [
        part
        for arg in args
        for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])
    ]
    if flag not in parts:
        return None, parts
    at = parts.index(flag)
    value = parts[at + 1 : at + 2]
    rest = parts[:at] + parts[at + 2 :]
    if not value or flag in rest:
        raise UserError(
            flag, " ".join(parts[at:]), "given once, with a value", f"{flag} VALUE"
        )
    return value[0], rest
