"""The command line of lm-evaluation-harness with the model type ``posbench``: ``python -m
posbench.cli.lm_eval``.

It takes the harness's own flags; :class:`posbench.cli.harness.PosbenchLM` documents ``--model_args``. From
Python, ``import posbench.cli.harness`` and call the harness's ``simple_evaluate(model="posbench", ...)``.
"""

from __future__ import annotations

import sys

from posbench import versions
from posbench.errors import UserError


def main() -> int:
    """Run the harness on ``sys.argv`` and return the exit status: 0 done, 2 something to mend."""
    try:
        versions.check()
        _cli()
    except UserError as error:
        print(f"posbench: {error}", file=sys.stderr)
        return 2
    return 0


def _cli() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate

        import posbench.cli.harness  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            "lm_eval",
            f"no module {error.name}",
            "lm-eval 0.4.13 or newer beside posbench",
            "pip install 'posbench[lm_eval]'",
        ) from error
    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
