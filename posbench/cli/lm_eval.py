"""``posbench lm_eval``: lm-evaluation-harness with the model type ``posbench``."""

from __future__ import annotations

import sys

from posbench.errors import UserError
from posbench.versions import install_hint


def lm_eval(args: list[str]) -> int:
    """Run lm-evaluation-harness on a model under a method; the flags are the harness's own.

    usage: posbench lm_eval --model posbench --model_args KEY=VALUE,... --tasks TASKS [FLAGS]

      pretrained=MODEL  a name of `posbench ls models`, a directory or a hub id
      method=METHOD     a name of `posbench ls methods`, or several: layer_scaling+scale_channel
      any other key     a field of the method (channel=15), of the model (dtype=float16) or of the
                        harness's own model (max_length=2048); a list has colons: layers=1:3
      config_dir=DIR    your own YAML files

    `posbench lm_eval run --help` prints the flags; they come with pip install 'positionbench[lm_eval]'.

    example: posbench lm_eval --model posbench --model_args pretrained=tiny,method=scale_channel --tasks mmlu
    """
    try:
        from lm_eval.__main__ import cli_evaluate

        import posbench.cli.harness  # noqa: F401
    except ModuleNotFoundError as error:
        allowed = "lm-eval 0.4.13 or newer with posbench"
        hint = install_hint("lm_eval")
        raise UserError("lm_eval", f"no module {error.name}", allowed, hint) from error
    argv = sys.argv
    sys.argv = ["posbench lm_eval", *args]
    try:
        cli_evaluate()
    except ValueError as error:
        fault, _, names = str(error).partition(": ")
        if fault != "Tasks not found":
            raise
        allowed = "tasks of lm-evaluation-harness, separated by commas"
        hint = "posbench lm_eval ls tasks"
        raise UserError("--tasks", names, allowed, hint) from error
    finally:
        sys.argv = argv
    return 0
