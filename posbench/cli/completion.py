"""``posbench completion``: completion with the Tab key in bash, zsh and fish.

shtab writes a parser's options down once; experiments, choices in one's own folder and keys of the typed choice
are looked up at each Tab.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from posbench import paths
from posbench.cli import main
from posbench.errors import UserError, choices
from posbench.export.base import FORMATS
from posbench.files.choices import read_choice
from posbench.files.parse import CORRECT_FILE, read_yaml
from posbench.run.folder import runs_in

CHOICES = {
    "bash": """_posbench() {
  local typed=${COMP_LINE:0:COMP_POINT} word IFS=$'\\n'
  word=${typed##* }
  COMPREPLY=($(posbench completion words "$typed" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")  # bash takes = and : for the start of a new word
  [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == *[=.] ]] && compopt -o nospace
}
complete -o default -F _posbench posbench""",
    "zsh": """#compdef posbench
_posbench() {
  local -a found=(${(f)"$(posbench completion words "$LBUFFER" 2>/dev/null)"})
  (( $#found )) || { _files; return }
  compadd -Q -S '' -- ${(M)found:#*=}
  compadd -Q -- ${found:#*=}
}
compdef _posbench posbench""",
    "fish": """complete -c posbench -a '(posbench completion words (commandline -cp) 2>/dev/null)'""",
}
VERBS_WITH_RUNS = (
    "report",
    "rescore",
    "audit",
    "show",
    "export",
    "push",
    "compare",
    "resume",
    "jobs",
    "collect",
)
"""Verbs whose arguments are runs, by folder or hash."""
VERBS_WITH_CHOICES = {"ls": "ls", "completion": "completion"}
"""Verbs whose first argument is one of the ``CHOICES`` of their module."""


def completion(args: list[str]) -> int:
    """Print a script that completes verbs, names, keys and flags with the Tab key.

    usage: posbench completion bash|zsh|fish

      bash  add to ~/.bashrc:                      eval "$(posbench completion bash)"
      zsh   add to ~/.zshrc, after compinit:       eval "$(posbench completion zsh)"
      fish  add to ~/.config/fish/config.fish:     posbench completion fish | source

    Your own YAML files are offered behind --config-dir DIR.

    example: eval "$(posbench completion bash)"; posbench experiment=yu2025_f<Tab>
    """
    if args[:1] == ["words"] and len(args) == 2:
        for word in words(args[1]):
            print(word)
    elif len(args) == 1 and args[0] in CHOICES:
        print(CHOICES[args[0]])
    else:
        raise UserError(
            "completion", " ".join(args), ", ".join(CHOICES), "posbench completion bash"
        )
    return 0


def words(line: str) -> list[str]:
    """Return the completions of the last word of a command line, which may be empty."""
    *typed, word = line.split(" ")[1:] or [""]
    verb = main.verb_of(typed)
    config_dir = dict(itertools.pairwise(typed)).get("--config-dir")
    folders = paths.config_folders(config_dir)
    candidates: list[str] = []
    if verb == "export" and (typed[-1:] == ["--to"] or word.startswith("--to=")):
        prefix = "--to=" if word.startswith("--to=") else ""
        candidates = [f"{prefix}{name}" for name in FORMATS]
    elif word.startswith("-"):
        candidates = _flags(verb)
    # A key is typed: offer its choices.
    elif "=" in word:
        key = word.partition("=")[0]
        names = choices(*paths.group_folders(key, folders))
        candidates = [f"{key}={name}" for name in names]
        if word.startswith("method=from:"):
            candidates = [f"method=from:{name}" for name in _run_hashes(typed)]
    # Verbs that take overrides, as a run does.
    elif verb in ("", "fetch", "validate", "figures", "submit"):
        candidates = [
            f"{name}=" for name in (*paths.GROUPS, "experiment", "stages", "budget")
        ]
        if not typed:
            candidates += [name for name in main.VERBS if " " not in name]
        if verb == "figures":
            candidates += choices(*paths.group_folders("experiment", folders))
        elif verb == "submit":
            candidates.append("runtime/cluster=")
        if "." in word:
            group = word.partition(".")[0]
            candidates += [f"{name}=" for name in _fields(group, typed, folders)]
    elif verb in VERBS_WITH_CHOICES:
        module = import_module(f"posbench.cli.{VERBS_WITH_CHOICES[verb]}")
        candidates = list(module.CHOICES)
    elif verb in VERBS_WITH_RUNS:
        candidates = _run_hashes(typed, sweeps=verb in ("report", "rescore"))
    return [candidate for candidate in candidates if candidate.startswith(word)]


def _run_hashes(typed: Sequence[str], sweeps: bool = False) -> list[str]:
    """Return the hashes of the runs in the outputs folder that is typed, else in the default one.

    Args:
        typed: Words of the command line.
        sweeps: List sweeps, too.
    """
    settings = dict(arg.split("=", 1) for arg in typed if "=" in arg)
    flags = dict(itertools.pairwise(typed))
    outputs = settings.get("runtime.outputs") or settings.get("--outputs")
    outputs = outputs or flags.get("--outputs") or "outputs"
    folder = Path(outputs).expanduser()
    names = [run.name for run in runs_in(folder)] if folder.is_dir() else []
    return sorted(
        name.rpartition("__")[2]
        for name in names
        if sweeps or not name.startswith("sweep__")
    )


def _flags(verb: str) -> list[str]:
    """The flags of a verb, or of a run if it is empty."""
    text = "-m --multirun --cfg --config-dir --help"
    if verb:
        text = main.usage(main.find_verb(verb))
    return sorted(set(re.findall(r"(?<!\S)\[?(--?[a-z-]+)", text)))


def _fields(group: str, typed: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Return the dotted keys of a group, for the choice that is typed, or else the default config's.

    Args:
        group: The group.
        typed: Words of the command line.
        folders: Config folders.
    """
    from posbench.model.load import ModelConfig
    from posbench.run.runtime import Runtime
    from posbench.schema import default_values, resolve_target

    cls: Any = {"model": ModelConfig, "runtime": Runtime}.get(group)
    if cls is None:
        config = read_yaml(paths.CONF / "config.yaml", hint=CORRECT_FILE)
        choice_of_group: dict[str, str] = {}
        for entry in config["defaults"]:
            if isinstance(entry, dict):
                choice_of_group |= entry
        choice_of_group |= dict(arg.split("=", 1) for arg in typed if "=" in arg)
        name = str(choice_of_group.get(group))
        if paths.find_choice(group, name, folders) is None:
            return []
        cls, _ = resolve_target(read_choice(group, name, folders), object, group)
    return [f"{group}.{key}" for key in default_values(cls)]
