"""``posbench lm_eval``: lm-evaluation-harness with the model type ``posbench``; the flags are its own."""

from __future__ import annotations

import sys

from posbench.errors import UserError


def command(args: list[str]) -> int:
    """Run the harness; :class:`posbench.cli.harness.PosbenchLM` documents ``--model_args``."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import posbench.cli.harness  # noqa: F401
    except ModuleNotFoundError as error:
        allowed, hint = "lm-eval 0.4.13 or newer with posbench", "pip install 'posbench[lm_eval]'"
        raise UserError("lm_eval", f"no module {error.name}", allowed, hint) from error
    before, sys.argv = sys.argv, ["posbench lm_eval", *args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
