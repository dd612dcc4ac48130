"""Command lines as other tools take them (lm-evaluation-harness, inspect), answered with posbench's spelling."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from posbench import paths
from posbench.backends.served import ROUTE
from posbench.errors import UserError, choices
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.schema import default_values, resolve_target
from posbench.tasks import Task

KEYS = {
    "--model": "model",
    "--model-base-url": "model.base_url",
    "--model-args": "",
    "--tasks": "task",
    "--task": "task",
    "--limit": "task.limit",
    "--num-fewshot": "task.shots",
    "--batch-size": "runtime.batch_size",
    "--device": "runtime.device",
    "--dtype": "model.dtype",
    "--output-path": "runtime.outputs",
    "--log-dir": "runtime.outputs",
    "--seed": "task.seed",
    "--max-tokens": "task.max_new_tokens",
    "--max-connections": "model.concurrency",
    "-T": "",
    "-M": "",
}
"""Key of posbench by flag, with hyphens for underscores; empty for flags whose values hold keys themselves."""
FLAGS_WITHOUT_KEY = (
    "--apply-chat-template",
    "--fewshot-as-multiturn",
    "--gen-kwargs",
    "--include-path",
    "--log-samples",
    "--max-batch-size",
    "--predict-only",
    "--system-instruction",
    "--temperature",
    "--use-cache",
    "--verbosity",
    "--write-out",
)
"""Flags that posbench has nothing for."""
TRANSLATED_MODEL_KEYS = {
    "pretrained": "model",
    "model": "model.name",
    "base_url": "model.base_url",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "max_length": "model.context_window",
    "max_model_len": "model.context_window",
    "num_concurrent": "model.concurrency",
    "device": "runtime.device",
    "device_map": "runtime.device_map",
    "parallelize": "runtime.device_map",
    "batch_size": "runtime.batch_size",
}
"""Key of posbench by model argument of the harness."""
ENGINES = ("hf", "hf-auto", "huggingface", "vllm", "sglang", "openai", "posbench")
"""Values of ``--model`` that name an engine, not a model."""
SERVED_BACKENDS = ("local-completions", "local-chat-completions", "openai-completions")
"""Values of ``--model`` that name an API of a server, not a model."""
DEFAULT_TASK = "kv_retrieval"
"""The task of a run that names none."""
FIRST_WORDS = ("run", "eval", "evaluate")
"""Verbs of other tools."""


def refuse_foreign_flags(verb: str, args: Sequence[str]) -> None:
    """Refuse the flags of other tools, and give the equivalent posbench command line.

    Args:
        verb: The verb that was typed; empty for a run.
        args: The arguments behind it.

    Raises:
        UserError: One of the arguments is such a flag; the hint is that line.
    """
    typed = [arg for arg in args if _flag_of(arg)]
    if not typed:
        return
    line, left_out = _translate(verb, args)
    hint = shlex.join(line)
    if left_out:
        hint += f" (without a counterpart here: {', '.join(left_out)})"
    raise UserError("flag", typed[0], "key=value", hint)


def _flag_of(arg: str) -> str:
    """An argument as a flag of another tool, spelled with hyphens; empty if it is not one."""
    name = arg.partition("=")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    return name if name in KEYS or name in FLAGS_WITHOUT_KEY else ""


def _translate(verb: str, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate arguments in the style of lm-evaluation-harness or inspect into a posbench command line.

    Args:
        verb: The verb, empty for a run.
        args: The other arguments.

    Returns:
        The words of the command line, and the arguments without a counterpart.
    """
    settings: dict[str, str] = {}
    left_out: list[str] = []
    positional: list[str] = []
    for flag, spelled, value in _flags_with_values(args):
        if not flag:
            # Without the other tool's own first words, such as "eval".
            words = [word for word in spelled.split() if word not in FIRST_WORDS]
            is_task = words and not positional and words[0] in _tasks()
            if is_task:
                settings["task"] = words[0]  # inspect names its task first
            else:
                positional += words
        elif flag in ("--model-args", "-M", "-T"):
            prefix = "task" if flag == "-T" else "model"
            _add_arguments(settings, left_out, prefix, value)
        elif not KEYS.get(flag):
            left_out.append(spelled)
        else:
            settings[KEYS[flag]] = value
    _settle_model(settings)
    if "task" in settings:
        names = settings["task"].replace(",", " ").split()
        unknown_tasks = [name for name in names if _task_here(name) is None]
        # Tasks that posbench does not have are left to the harness.
        if unknown_tasks:
            return _harness_line(settings, names), left_out
        tasks = dict.fromkeys(str(_task_here(name)) for name in names)
        settings["task"] = ",".join(tasks)
        # A name such as longbench_hotpotqa is a task and a subset.
        subsets = [name.partition("_")[2] for name in names if name not in _tasks()]
        if len(tasks) == 1 and all(subsets) and subsets:
            settings["task.subsets"] = f"[{','.join(subsets)}]"
    for key, value in _bad_settings(settings, positional):
        left_out.append(f"{key}={value}")
        del settings[key]
    sweep = ["-m"] if "," in settings.get("task", "") and not verb else []
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return ["posbench", *verb.split(), *sweep, *overrides, *positional], left_out


def _flags_with_values(args: Sequence[str]) -> list[tuple[str, str, str]]:
    """Split arguments into flags with their values.

    Returns:
        For each flag: its canonical name, its typed form, and its value; for any other argument: an empty name, the
        argument, and an empty value.
    """
    result = []
    index = 0
    while index < len(args):
        arg = args[index]
        index += 1
        flag = _flag_of(arg)
        if not flag:
            result.append(("", arg, ""))
            continue
        values = [arg.partition("=")[2]] if "=" in arg else []
        # These flags take several words.
        while not values or flag in ("--tasks", "--model-args"):
            if "=" in arg or index == len(args) or args[index].startswith("-"):
                break
            if values and flag == "--tasks" and "=" in args[index]:
                break  # an override of posbench
            values.append(args[index])
            index += 1
        separator = " " if flag == "--tasks" else ","
        value = separator.join(values)
        result.append((flag, arg if "=" in arg else f"{arg} {value}".strip(), value))
    return result


def _add_arguments(
    settings: dict[str, str], left_out: list[str], prefix: str, text: str
) -> None:
    """Add the settings of ``key=value,key=value``, for the model or the task.

    Args:
        settings: Values by key of posbench; changed.
        left_out: Arguments without a counterpart; changed.
        prefix: ``model`` or ``task``.
        text: The arguments.
    """
    for argument in filter(None, text.split(",")):
        name, _, value = argument.partition("=")
        if prefix == "task":
            settings[f"task.{name}"] = value
        elif name not in TRANSLATED_MODEL_KEYS:
            left_out.append(argument)
        elif name == "parallelize":
            settings[TRANSLATED_MODEL_KEYS[name]] = "auto"
        else:
            settings[TRANSLATED_MODEL_KEYS[name]] = value


def _settle_model(settings: dict[str, str]) -> None:
    """Change the settings so that ``model`` names a checkpoint, or a served model where there is a URL.

    Args:
        settings: Values by config key; changed in place.
    """
    served_name = settings.pop("model.name", None)
    url = settings.get("model.base_url")
    model = settings.get("model")
    # Other tools name their engine where posbench names the model.
    is_backend = model in (*ENGINES, *SERVED_BACKENDS)
    if url:
        name = served_name or ("" if is_backend else model) or "NAME"
        del settings["model.base_url"]
        settings["model"] = "endpoint"
        settings["model.base_url"] = ROUTE.sub("", url)
        settings["model.name"] = name
        if model == "local-chat-completions" or url.endswith("chat/completions"):
            settings["model.api"] = "chat"
    elif is_backend:
        settings["model"] = "DIR_OR_HUB_ID"
    elif model:
        model = re.sub(r"^(hf|vllm)/", "", model)  # inspect's providers
        settings["model"] = model
        is_choice = model in choices(paths.CONF / "model")
        if "/" not in model and not is_choice and not Path(model).exists():
            settings["model"] = "hf"
            settings["model.path"] = model  # a hub id without an organisation


def _bad_settings(
    settings: dict[str, str], kept: Sequence[str]
) -> list[tuple[str, str]]:
    """Return key and value of settings that the task does not have, or whose value means nothing here.

    Args:
        settings: Values by key.
        kept: Overrides that were typed as posbench takes them.
    """
    typed = dict(word.split("=", 1) for word in kept if "=" in word)
    task = settings.get("task") or typed.get("task") or DEFAULT_TASK
    fields = _fields_of_task(task.partition(",")[0])
    bad = []
    for key, value in settings.items():
        group, _, name = key.partition(".")
        is_unknown = group == "task" and name and name not in fields
        is_auto_batch = key == "runtime.batch_size" and not value.isdigit()
        # Other tools take a limit below 1 as a share.
        is_share = key == "task.limit" and not value.isdigit()
        if is_unknown or is_auto_batch or is_share:
            bad.append((key, value))
    return bad


def _harness_line(settings: dict[str, str], tasks: Sequence[str]) -> list[str]:
    """Return the command line that runs tasks which posbench does not have in lm-evaluation-harness, under a method.

    Args:
        settings: Values by config key.
        tasks: Names of the harness's tasks.
    """
    arguments = [f"pretrained={settings.get('model', 'DIR_OR_HUB_ID')}", "method=NAME"]
    for name in ("dtype", "revision"):
        value = settings.get(f"model.{name}")
        if value:
            arguments.append(f"{name}={value}")
    line = ["posbench", "lm_eval", "--model", "posbench"]
    line += ["--model_args", ",".join(arguments), "--tasks", ",".join(tasks)]
    flags = {
        "--limit": "task.limit",
        "--num_fewshot": "task.shots",
        "--batch_size": "runtime.batch_size",
        "--device": "runtime.device",
    }
    for flag, key in flags.items():
        if key in settings:
            line += [flag, settings[key]]
    return line


def _tasks() -> list[str]:
    """Names of posbench's tasks."""
    return choices(paths.CONF / "task")


def _task_here(name: str) -> str | None:
    """Posbench's task for one of the harness (``mmlu_anatomy``, ``longbench_qasper``); None without one."""
    begins = [task for task in _tasks() if re.match(rf"{task}([-_]|$)", name)]
    return begins[0] if begins else None


def _fields_of_task(name: str) -> set[str]:
    """Keys of a task."""
    file = paths.CONF / "task" / f"{name}.yaml"
    if not file.is_file():
        return set()  # the user's own, which the run checks
    cls, _ = resolve_target(read_yaml(file, hint=CORRECT_FILE), Task, "task")  # type: ignore[type-abstract]
    return set(default_values(cls))
