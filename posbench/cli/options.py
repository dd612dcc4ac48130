"""Options and flags of verbs.

argparse would not be shorter, and would lose a promise: its messages say neither what is allowed nor the next
step, and it reads overrides such as ``-m`` and ``~key`` as its own options.
"""

from __future__ import annotations

from collections.abc import Sequence

from posbench.errors import UserError


def flag(args: Sequence[str], name: str) -> tuple[bool, list[str]]:
    """Split a flag, which has no value, from arguments.

    Args:
        args: Arguments of a verb.
        name: The flag.

    Returns:
        Whether it is among them, and the remaining arguments.
    """
    return name in args, [arg for arg in args if arg != name]


def option(args: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    """Split an option from arguments.

    Args:
        args: Arguments of a verb.
        flag: The option, written ``flag VALUE`` or ``flag=VALUE``.

    Returns:
        Its value, None where it is absent, and the remaining arguments.

    Raises:
        UserError: It has no value, or is given twice.
    """
    pieces: list[str] = []
    for arg in args:
        if arg.startswith(f"{flag}="):
            pieces += arg.split("=", 1)
        else:
            pieces.append(arg)
    if flag not in pieces:
        return None, pieces
    index = pieces.index(flag)
    value = pieces[index + 1 : index + 2]
    remaining = pieces[:index] + pieces[index + 2 :]
    if not value or flag in remaining:
        typed = " ".join(pieces[index:])
        raise UserError(flag, typed, "the flag once, with a value", f"{flag} VALUE")
    return value[0], remaining
