"""The one error a user can cause, printed as one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path


class UserError(Exception):
    """Bad input: names the field, its value, what is allowed and the next step.

    The command line prints ``str(error)`` and exits with status 2.

    Args:
        field: Dotted name of the config field, argument or file.
        value: What was given.
        allowed: What would have been accepted.
        hint: The next step for the user.
    """

    def __init__(self, field: str, value: object, allowed: str, hint: str) -> None:
        self.field, self.value, self.allowed, self.hint = field, value, allowed, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.field} = {self.value!r}: allowed: {self.allowed}; next: {self.hint}"
        return " ".join(line.split())


def choices(*folders: Path) -> list[str]:
    """Names of the YAML files in config folders."""
    return sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})


def near(name: str, known: Sequence[str], otherwise: str) -> str:
    """A hint that names the closest known name, or says something else."""
    begun = [k for k in known if name and k.startswith(name)]
    match = begun[:1] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {match[0]}?" if match else otherwise


def from_hydra(error: Exception, overrides: Sequence[str], config_dir: str | None) -> UserError:
    """Hydra's, OmegaConf's and the YAML parser's complaints in our form.

    Args:
        error: What they raised.
        overrides: The ``key=value`` arguments.
        config_dir: The user's own config folder.
    """
    import yaml

    from posbench.paths import CONF

    text = " ".join(str(error).split()) or type(error).__name__
    reason = text if len(text) <= 160 else f"{text[:160]} ..."
    folders = [CONF, *([Path(config_dir)] if config_dir else [])]
    if isinstance(error, yaml.YAMLError):
        return UserError("config file", str(folders[-1]), "valid YAML", f"mend it ({reason})")
    if "Additional config directory" in text:
        return UserError("--config-dir", config_dir, "a folder with your YAML files", "check the path")
    missing = re.search(r"Could not (?:find|load) '(\w+)/([^']*)'", text)
    if missing:
        group, choice = missing.groups()
        plural = {"search": "searches", "study": "studies"}.get(group, f"{group}s")
        known = choices(*(folder / group for folder in folders))
        return UserError(group, choice, ", ".join(known), near(choice, known, f"posbench ls {plural}"))
    parsed = getattr(error, "override", None)
    if isinstance(parsed, str):
        return UserError(parsed.split("=")[0], parsed, "key=value, a list as [a,b]", f"mend it ({reason})")
    typed = {o.lstrip("+~").split("=")[0]: o for o in overrides}
    key = str(
        getattr(error, "full_key", None)
        or next((k for k in typed if re.search(rf"'{re.escape(k)}['=]", text)), "")
    )
    value = typed[key].partition("=")[2] or typed[key] if key in typed else " ".join(overrides)
    if "Ambiguous value" in text:
        return UserError(key, value, "one value; a list as [a,b]", "sweep with -m (--multirun)")
    if key in typed and re.search(r"Could not override|not in struct|No match in the defaults list", text):
        group, _, _ = key.rpartition(".")
        files = sorted((CONF / group).glob("*.yaml")) if group else [CONF / "config.yaml"]
        defaults = [
            d for d in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"] if isinstance(d, dict)
        ]
        chosen = typed.get(group, "").partition("=")[2] or next(
            (str(d[group]) for d in defaults if group in d), ""
        )
        own = CONF / group / f"{chosen}.yaml"
        # Tasks, methods and studies have keys of their own; the files of other groups share theirs.
        files = [own] if group in ("task", "method", "study") and own.is_file() else files
        part = re.fullmatch(r"method\.parts\.(\w+)", group)
        files = [CONF / "method" / f"{part[1]}.yaml"] if part else files
        if group == "method" and chosen.startswith("["):
            parts = ", ".join(f"method.parts.{name.strip()}" for name in chosen.strip("[]").split(","))
            return UserError(key, value, f"keys of {parts}", "name the part: method.parts.NAME.KEY=...")
        names = {str(k) for file in files for k in yaml.safe_load(file.read_text())} - {
            "_target_",
            "defaults",
            "hydra",
        }
        names |= set() if group else {"model", "task", "method", "search", "runtime", "study"}
        if names:
            dotted = [f"{group}.{name}".strip(".") for name in sorted(names)]
            hint = (
                f"your YAML leaves it out: write +{typed[key]}"
                if key in dotted
                else near(key, dotted, "remove it")
            )
            return UserError(key, value, f"keys {', '.join(sorted(names))}", hint)
    return UserError(key or "config", value, "what conf/ holds", f"see posbench --cfg job ({reason})")
