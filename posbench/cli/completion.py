"""``posbench completion``: what the Tab key offers in bash, zsh and fish."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from posbench import paths
from posbench.cli import main
from posbench.errors import UserError, choices

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
GROUPS = "model", "task", "method", "search", "study", "runtime"


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
    """What the last word of a command line, typed up to here, can become."""
    *typed, word = line.split(" ")[1:] or [""]
    verb = main.verb_of(typed)
    roots = paths.config_folders(dict(itertools.pairwise(typed)).get("--config-dir"))
    experiments = choices(
        paths.EXPERIMENTS, *(root / "experiment" for root in roots[1:])
    )
    key, value, _ = word.partition("=")
    if word.startswith("-"):
        told = (
            main.usage(main.find_verb(verb))
            if verb
            else "-m --multirun --cfg --config-dir --help"
        )
        found = sorted(set(re.findall(r"(?<!\S)\[?(--?[a-z-]+)", told)))
    elif value:
        names = (
            experiments
            if key == "experiment"
            else choices(*(root / key for root in roots))
        )
        found = [f"{key}={name}" for name in names]
    elif verb in ("", "fetch", "validate", "figures", "submit"):
        found = [f"{name}=" for name in (*GROUPS, "experiment", "stages")]
        found += [] if typed else [verb for verb in main.VERBS if " " not in verb]
        found += (
            experiments
            if verb == "figures"
            else ["runtime/cluster="]
            if verb == "submit"
            else []
        )
        found += (
            [f"{name}=" for name in _fields(word.partition(".")[0], typed, roots)]
            if "." in word
            else []
        )
    else:
        listed = {"ls": "verbs", "docs": "docs", "completion": "completion"}.get(verb)
        found = [*import_module(f"posbench.cli.{listed}").CHOICES] if listed else []
    return [each for each in found if each.startswith(word)]


def _fields(group: str, typed: Sequence[str], roots: Sequence[Path]) -> list[str]:
    """The keys of the choice of a group that is typed, or that a run takes without a word."""
    from posbench.model.load import ModelConfig
    from posbench.run.runtime import Runtime
    from posbench.schema import defaults, target

    cls: Any = {"model": ModelConfig, "runtime": Runtime}.get(group)
    if cls is None:
        listed = yaml.safe_load((paths.CONF / "config.yaml").read_text())["defaults"]
        chosen = dict(
            pair
            for entry in listed
            if isinstance(entry, dict)
            for pair in entry.items()
        )
        chosen |= dict(arg.split("=", 1) for arg in typed if "=" in arg)
        file = next(
            (
                f
                for r in roots
                if (f := r / group / f"{chosen.get(group)}.yaml").is_file()
            ),
            None,
        )
        cls = (
            target(yaml.safe_load(file.read_text()), object, group)[0] if file else None
        )
    return [f"{group}.{key}" for key in defaults(cls)] if cls else []
