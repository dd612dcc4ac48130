"""The interface of a format, and the comparison of its files with the method in process."""

from __future__ import annotations

import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from posbench.errors import UserError
from posbench.late import Tensor, torch
from posbench.methods.base import CheckpointChange, Method
from posbench.methods.composed import Composed
from posbench.model.lm import LM
from posbench.versions import install_hint

Prompts = Sequence[Sequence[int]]
"""Prompts as token ids."""

EXACT_TOLERANCE_NATS = 1e-4
"""Largest allowed difference of log-probabilities from the method in process, for
weights and products in float32 or better."""
ROUGH_TOLERANCE_NATS = 5e-2
"""The same for half precision and quantised weights, which round every product."""
ROUGH_TOLERANCE_SHARE = 0.1
"""The same as a share of the method's effect; the larger of the two tolerances counts."""
ROUNDING_TOLERANCE_FACTOR = 2
"""The same as a multiple of the effect of rounded weights on the unmodified model."""


PUBLISHED_FILES = (
    "generation_config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files beside config and weights that programs read, or that a licence asks for."""


@dataclass(frozen=True)
class Fix:
    """A method with its constants on a model, to be written for others to load.

    Attributes:
        lm: The unmodified model.
        method: The method.
        base: Where others get the model: hub id or directory.
        revision: Branch, tag or commit on the hub; None: its default.
        load: Loads the model once more, without the method.
        dtype: Dtype of the model's published weights.
        files: Directory of the model on this machine.
        weights: Type of matrices in a GGUF file, one of the format's ``weight_types``;
            empty: float16 where the published weights are in half precision, else float32.
    """

    lm: LM
    method: Method
    base: str
    load: Callable[[], LM]
    dtype: str = "float32"
    files: str = ""
    weights: str = ""
    revision: str | None = None

    @property
    def method_name(self) -> str:
        """The method's name, or those of its parts."""
        if isinstance(self.method, Composed):
            return " with ".join(self.method.parts)
        return self.method.short_name()

    def copy_published(self, folder: Path) -> None:
        """Copy tokenizer, processor, generation config and licence as they were published; write what was not there."""
        files = Path(self.files)
        copied = [
            file
            for pattern in PUBLISHED_FILES
            for file in (files.glob(pattern) if self.files else ())
            if file.is_file()
        ]
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        if self.lm.tokenizer is not None and not any(
            file.name.startswith(("tokenizer", "vocab", "tekken")) for file in copied
        ):
            self.lm.tokenizer.save_pretrained(folder)

    def with_base(self, usage: str) -> str:
        """A text on how to load the files, with the model in place of ``BASE``, in its revision."""
        served = f"vllm serve {shlex.quote(self.base)}"
        if self.revision:
            usage = usage.replace('"BASE"', f'"BASE", revision="{self.revision}"')
            served += f" --revision {self.revision}"
        # In one pass: the model's name may hold these words.
        return re.sub(
            "(vllm serve )?BASE", lambda m: served if m[1] else self.base, usage
        )

    @property
    def exact(self) -> bool:
        """Whether weights and products are of float32 or better."""
        model = self.lm.model
        has_exact_weights = self.dtype in ("float32", "float64")
        has_exact_products = model.dtype in (torch.float32, torch.float64)
        is_quantised = getattr(model.config, "quantization_config", None) is not None
        return has_exact_weights and has_exact_products and not is_quantised


class Format(ABC):
    """A way to write a fix. Each format's module has one subclass, ``Export``.

    Attributes:
        name: Its name on the command line.
        folds: Whether it holds only methods that fold into the checkpoint.
        package: Package that loads the files, where posbench does not require it.
        library: Library under which model hubs list the files.
        weight_types: Types of weights that can be asked for.
    """

    name: ClassVar[str]
    folds: ClassVar[bool] = True
    package: ClassVar[str] = ""
    library: ClassVar[str] = "transformers"
    weight_types: ClassVar[tuple[str, ...]] = ()

    def check(self, fix: Fix) -> None:
        """Raise UserError where the format cannot hold the method or the model."""
        if self.folds:
            checkpoint_change(fix, self.name)

    def has_code(self, method: Method) -> bool:
        """Whether the format holds a method, one by itself, as a file of code."""
        return False

    @abstractmethod
    def write(self, fix: Fix, folder: Path) -> None:
        """Write the files that an engine loads."""

    @abstractmethod
    def read(self, fix: Fix, folder: Path, prompts: Prompts) -> Tensor:
        """Load the files with their engine and predict the next token of each prompt.

        Args:
            fix: The fix that was written.
            folder: Folder of the files.
            prompts: N prompts as token ids.

        Returns:
            Log-probabilities in nats, shape (N, vocabulary), float64.
        """

    def missing(self) -> str:
        """The software that this machine lacks to load the files, and where else they can be checked.

        Empty if nothing is missing.
        """
        return ""

    def rounding(self, fix: Fix, unmodified: Tensor, prompts: Prompts) -> float:
        """Return how much rounded weights alone change predictions, in nats, for types far from float; else 0.

        Args:
            fix: The fix that was written.
            unmodified: Log-probabilities of the unmodified model in process.
            prompts: N prompts as token ids.
        """
        return 0.0

    def exact(self, fix: Fix) -> bool:
        """Whether the engine that loads the files computes in float32 or better."""
        return fix.exact

    @abstractmethod
    def usage(self, fix: Fix) -> str:
        """How to load the files, as Markdown; DIR is their folder."""


FORMATS = ("checkpoint", "lora", "gguf", "gguf-lora", "transformers", "vllm-plugin")
"""The formats, each a module of this package with a class ``Export``."""


def find_format(name: str) -> Format:
    """Return the export format of a name.

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
    module = import_module(f"posbench.export.{name.replace('-', '_')}")
    form: Format = module.Export()
    if form.package:
        try:
            import_module(form.package)
        except ImportError as error:
            allowed = (
                f"a format whose package is installed; {form.package} is not ({error})"
            )
            raise UserError("--to", name, allowed, install_hint("export")) from error
    return form


def checkpoint_change(fix: Fix, to: str) -> CheckpointChange:
    """Return the change of weights or config that equals the method.

    Args:
        fix: Model and method.
        to: Name of the format, for the error.

    Raises:
        UserError: The method cannot be written as such a change.
    """
    change = fix.method.folded(fix.lm)
    if change is None:
        allowed = f"a format that holds {fix.method_name} with these parameters: it does not fold into a checkpoint"
        raise UserError("--to", to, allowed, other_format(fix))
    return change


def other_format(fix: Fix) -> str:
    """The format that holds a method which this one does not, as the next step of a message."""
    if fix.method.folded(fix.lm) is not None:
        return "--to checkpoint"
    if find_format("transformers").has_code(fix.method):
        return "--to transformers"
    if fix.method.twin().folded(fix.lm) is not None:
        return "--to checkpoint, which writes its twin for all tokens"
    return "none holds it yet: use it in process, as lm.model inside its block"


def next_token(lm: LM, prompts: Prompts) -> Tensor:
    """Predict the next token of each prompt, one prompt per forward.

    Args:
        lm: The model.
        prompts: N prompts as token ids.

    Returns:
        Log-probabilities in nats, shape (N, vocabulary), float64, on the CPU.
    """
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            inputs = lm.pad([prompt])
            output = lm.model(**inputs, use_cache=True, logits_to_keep=1)
            logits = output.logits[0, -1].to(torch.float64)
            rows.append(logits.log_softmax(-1).cpu())
    return torch.stack(rows)


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between log-probabilities, over tokens that both hold.

    An engine may pad its vocabulary, or leave tokens out (NaN).

    Args:
        a: Log-probabilities in nats, shape (N, vocabulary).
        b: Log-probabilities to compare, shape (N, vocabulary of the engine).

    Returns:
        The difference in nats; infinite if ``b`` has no token of a prompt.
    """
    if bool(b.isnan().all(1).any()):
        return float("inf")
    width = min(a.shape[1], b.shape[1])
    gaps = (a[:, :width] - b[:, :width]).abs()
    return float(gaps.nan_to_num(nan=0.0, posinf=torch.inf).max())


@dataclass(frozen=True)
class Comparison:
    """Comparison of the loaded files with the method in process.

    Attributes:
        difference: Largest difference of log-probabilities, in nats.
        unmodified: The same difference for the unmodified model.
        tolerance: Largest allowed difference, in nats.
        prompts: Number of prompts.
        tokens: Length of the longest prompt.
    """

    difference: float
    unmodified: float
    tolerance: float
    prompts: int
    tokens: int

    @property
    def holds(self) -> bool:
        """Whether the files agree with the method."""
        return self.difference <= self.tolerance

    @property
    def words(self) -> str:
        """The comparison as one line of text."""
        compared = f"{self.prompts} prompts of up to {self.tokens} tokens"
        near = f"{self.difference:.1e} nats at most between the files and the method in process"
        far = f"the unmodified model is {self.unmodified:.2g} away"
        return f"{near} (allowed {self.tolerance:.1g}), {compared}; {far}"


@dataclass(frozen=True)
class Unverified:
    """In the place of :class:`Comparison` where the engine of the files is not installed."""

    words: str


def measure(form: Format, fix: Fix, folder: Path, prompts: Prompts) -> Comparison:
    """Load the files of a format and compare them with the method in process.

    Args:
        form: The format.
        fix: The fix that was written.
        folder: Folder of the files.
        prompts: Prompts as token ids.
    """
    with fix.method.applied(fix.lm) as lm:
        expected = next_token(lm, prompts)
    unmodified = next_token(fix.lm, prompts)
    actual = form.read(fix, folder, prompts)
    effect = difference(expected, unmodified)
    tolerance = EXACT_TOLERANCE_NATS
    # Formats that round may differ by more, in proportion to the method's effect.
    if not form.exact(fix):
        rounding = form.rounding(fix, unmodified, prompts)
        tolerance = max(
            ROUGH_TOLERANCE_NATS,
            ROUGH_TOLERANCE_SHARE * effect,
            ROUNDING_TOLERANCE_FACTOR * rounding,
        )
    return Comparison(
        difference=difference(expected, actual),
        unmodified=effect,
        tolerance=tolerance,
        prompts=len(prompts),
        tokens=max(map(len, prompts)),
    )
