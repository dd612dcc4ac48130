"""What every format is, and how what it wrote is held against the method in process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from posbench.errors import UserError
from posbench.late import Tensor, torch
from posbench.methods.base import Folded, Method
from posbench.model.lm import LM

Prompts = Sequence[Sequence[int]]
"""Prompts as token ids."""

EXACT = 1e-4
ROUGH = 5e-2
SHARE = 0.1
"""Largest difference of log-probabilities (nats) from the method in process that is allowed: of numbers in
float32 or better; and of half precision and quantised weights, which round every product, or that share of
what the method changes, if it is more."""


@dataclass(frozen=True)
class Fix:
    """A model and a method with its constants, to be written so that others can load them."""

    lm: LM
    method: Method
    base: str  # where others find the model: hub id or directory
    load: Callable[[], LM]  # the model once more, without the method
    dtype: str = "float32"  # of the model's published weights
    files: str = ""  # the directory of the model on this machine

    @property
    def exact(self) -> bool:
        """Whether weights and products are of float32 or better."""
        precise = self.dtype in ("float32", "float64") and self.lm.model.dtype in (
            torch.float32,
            torch.float64,
        )
        return (
            precise
            and getattr(self.lm.model.config, "quantization_config", None) is None
        )


class Format(ABC):
    """A way to write a fix; the file of a format holds one."""

    name: ClassVar[str]
    folds: ClassVar[bool] = True  # whether it holds only what folds into the checkpoint
    package: ClassVar[str] = ""  # that loads it, where posbench does not come with it
    library: ClassVar[str] = "transformers"  # by which model hubs list it

    def check(self, fix: Fix) -> None:
        """Raise UserError where the format cannot hold the method or the model."""
        if self.folds:
            folded(fix, self.name)

    @abstractmethod
    def write(self, fix: Fix, folder: Path) -> None:
        """Write the files that an engine loads."""

    @abstractmethod
    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Log-probabilities (nats) of the token after each of N prompts, [N, V], from the engine that loads
        the files."""

    def missing(self) -> str:
        """What is not on this machine that loads the files, and where they can be checked instead; empty
        where all is here."""
        return ""

    def exact(self, fix: Fix) -> bool:
        """As :class:`Fix`, of the engine that loads the files."""
        return fix.exact

    @abstractmethod
    def usage(self, fix: Fix) -> str:
        """How to load the files, as Markdown; DIR stands for their folder."""


FORMATS = ("checkpoint", "lora", "gguf", "gguf-lora", "transformers", "vllm-plugin")
"""The formats, each a module of this package with a class ``Export``."""


def find(name: str) -> Format:
    """A format by its name.

    Raises:
        UserError: There is none, or the package that loads it is missing.
    """
    if name not in FORMATS:
        raise UserError(
            "--to",
            name,
            ", ".join(FORMATS),
            "posbench export --help says what each is for",
        )
    made: Format = import_module(f"posbench.export.{name.replace('-', '_')}").Export()
    if made.package:
        try:
            import_module(made.package)
        except ImportError as error:
            allowed = (
                f"a format whose package is installed; {made.package} is not ({error})"
            )
            raise UserError(
                "--to", name, allowed, "pip install 'posbench[export]'"
            ) from error
    return made


def folded(fix: Fix, to: str) -> Folded:
    """The method as a change of the checkpoint.

    Raises:
        UserError: It has none.
    """
    found = fix.method.folded(fix.lm)
    if found is None:
        allowed = f"a format that holds {fix.method.short_name()} with these parameters"
        allowed += ": it does not fold into a checkpoint"
        raise UserError("--to", to, allowed, "--to transformers")
    return found


def next_token(lm: LM, prompts: Prompts) -> Tensor:
    """Log-probabilities (nats) of the token after each of N prompts, [N, V], each read alone."""
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            out = lm.model(**lm.pad([prompt]), use_cache=True, logits_to_keep=1)
            rows.append(out.logits[0, -1].to(torch.float64).log_softmax(-1).cpu())
    return torch.stack(rows)


def difference(one: Tensor, other: Tensor) -> float:
    """Largest difference between log-probabilities [N, V] where both are known: an engine may pad its
    vocabulary, or leave tokens out (NaN), but not all of a prompt."""
    if bool(other.isnan().all(1).any()):
        return float("inf")
    width = min(one.shape[1], other.shape[1])
    return float(
        (one[:, :width] - other[:, :width])
        .abs()
        .nan_to_num(nan=0.0, posinf=torch.inf)
        .max()
    )


@dataclass(frozen=True)
class Measured:
    """What was loaded again, held against the method in process."""

    difference: float  # largest difference of log-probabilities, in nats
    unmodified: float  # that of the unmodified model
    tolerance: float
    prompts: int
    tokens: int  # of the longest prompt

    @property
    def holds(self) -> bool:
        """Whether the files do what the method does."""
        return self.difference <= self.tolerance

    @property
    def words(self) -> str:
        """In one line."""
        asked = f"{self.prompts} prompts of up to {self.tokens} tokens"
        near = f"{self.difference:.1e} nats at most between the files and the method in process"
        far = f"the unmodified model is {self.unmodified:.2g} away"
        return f"{near} (allowed {self.tolerance:.1g}), {asked}; {far}"


@dataclass(frozen=True)
class Unverified:
    """Stands for :class:`Measured` where what loads the files is not there."""

    words: str


def measure(form: Format, fix: Fix, folder: Path, prompts: Prompts) -> Measured:
    """Load what a format wrote and hold it against the method."""
    with fix.method.applied(fix.lm) as lm:
        wanted = next_token(lm, prompts)
    plain = next_token(fix.lm, prompts)
    got = form.read(fix, folder, prompts)
    sizes: dict[str, Any] = {"prompts": len(prompts), "tokens": max(map(len, prompts))}
    far = difference(wanted, plain)
    allowed = EXACT if form.exact(fix) else max(ROUGH, SHARE * far)
    return Measured(difference(wanted, got), far, allowed, **sizes)
