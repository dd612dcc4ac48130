"""The contract of a method: plain data plus one context manager."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from inspect import Signature
from typing import Any, ClassVar, NamedTuple, Self

from posbench.files.sources import Source
from posbench.model import families, rope
from posbench.model.encode import Encoder
from posbench.model.guard import exclusive
from posbench.model.items import ItemPrompt
from posbench.model.lm import LM
from posbench.schema import verify
from posbench.stats.findings import with_subject


class Needs(NamedTuple):
    """Requirements of a method on a model.

    Attributes:
        rope: Rotary embeddings.
        plain: Rotary embeddings whose angles follow from the base alone.
        by_hand: Attention through the library's functions, in front of which the method puts its own.
        items: Prompts whose items are known; see :func:`posbench.model.items.reading_items`.
        full_attention: Layers that see the whole prompt: no sliding window below the context window.
    """

    rope: bool = False
    plain: bool = False
    by_hand: bool = False
    items: bool = False
    full_attention: bool = False


class CheckpointChange(NamedTuple):
    """A method as a change of the checkpoint.

    Attributes:
        columns: By layer and channel, the factor of that column of the query and key projections.
        rope: Keys of the config's ``rope_parameters``, with their values.
    """

    columns: Mapping[int, Mapping[int, float]] = {}
    rope: Mapping[str, Any] = {}


class Continuation(NamedTuple):
    """A method where it continues a shared prefill: it scales channels of the attention input.

    Attributes:
        channels: The channels; none changes nothing.
        factor: Their factor.
        layers: The layers.
        scales_inputs: Whether the queries and keys of the tokens that continue come from scaled inputs.
        scales_keys: Whether the keys of the prefill do.
    """

    channels: tuple[int, ...] = ()
    factor: float = 1.0
    layers: Collection[int] = ()
    scales_inputs: bool = True
    scales_keys: bool = True


class SweepClaims(NamedTuple):
    """A paper's claims on a sweep over one of a method's parameters, each in words.

    Attributes:
        attention: A larger value moves attention to the beginning.
        score: A larger value favours the beginning.
        bias: From 0 up, a larger value means more position bias.
        peak: The average score peaks within ``best``.
        best: Lowest and highest value of that range.
        neutral: The value that leaves the model as it is; ``bias`` is a claim on both of its sides.
    """

    attention: str
    score: str
    bias: str
    peak: str
    best: tuple[float, float]
    neutral: float = 1.0

    def asked_of(self, subject: str) -> Self:
        """The same claims, each naming its subject; see :meth:`Method.sweep_subject`."""
        return self._replace(
            attention=with_subject(self.attention, subject),
            score=with_subject(self.score, subject),
            bias=with_subject(self.bias, subject),
            peak=with_subject(self.peak, subject),
        )


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """An intervention at inference time. The fields are the keys of ``method.*``, with their defaults.

    Attributes:
        needs: Requirements on the model; other models are refused by name.
        rows_per_prompt: Whether a prompt may run as several rows of a batch.
        sweep_claims: A paper's claims on sweeps, by field.
        always_folds: Whether :meth:`folded` gives a change on every model.
        untrained: Parameters with which a method that wants training runs without it; a diagnosis tries them.
    """

    needs: ClassVar[Needs] = Needs()
    rows_per_prompt: ClassVar[bool] = False
    sweep_claims: ClassVar[Mapping[str, SweepClaims]] = {}
    always_folds: ClassVar[bool] = False
    untrained: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def sweep_subject(
        cls, settings: Mapping[str, Any], model: Mapping[str, Any]
    ) -> str:
        """Subject in the model of the :attr:`sweep_claims` on a sweep, where there may be several; else empty.

        Args:
            settings: The method's settings in a run of the sweep.
            model: The model's file, with its blocks.
        """
        return ""

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An instance that fits a model and changes it, for the contract tests and the latency study."""
        return cls()

    @classmethod
    def short_name(cls) -> str:
        """Name of its module, by which a config chooses it."""
        return cls.__module__.rpartition(".")[2]

    @classmethod
    def files(cls, values: Mapping[str, Any]) -> tuple[Source, ...]:
        """The files that its parameters name; their content is part of a run's identity."""
        return ()

    @property
    def needs_prompt(self) -> bool:
        """Whether the last prompt tokens are changed in another way, so that a text needs a prompt."""
        return False

    @property
    def rewrites(self) -> bool:
        """Whether :meth:`rewrite` changes prompts."""
        return type(self).rewrite is not Method.rewrite

    @property
    def rewrites_by_text(self) -> bool:
        """Whether :meth:`rewrite` needs the prompt alone, and no weights of a model."""
        return not self.rewrites

    def rewrite(self, lm: Encoder, prompt: ItemPrompt) -> ItemPrompt:
        """Return the prompt to ask instead of a task's prompt; unchanged by default.

        It is called before the prompt is encoded, outside the block of :meth:`applied`, and never learns which item is
        gold. ``items[i]`` of the result is item i of ``prompt``, wherever its text now stands: tables keep the task's
        gold position.

        Args:
            lm: The model, which may be asked about the prompt, or the tokenizer of a served one.
            prompt: The task's prompt.
        """
        return prompt

    @property
    def extra_reply_tokens(self) -> int:
        """Tokens that a reply needs in addition to those of the task's answer; 0 by default."""
        return 0

    @property
    def answer_cue(self) -> str:
        """Text after whose last occurrence in a reply the answer stands, which alone is scored; empty: all is answer.

        A reply without it is scored whole. A run keeps what stands before the answer as the row's ``quote``.
        """
        return ""

    def check(self, lm: LM) -> None:
        """Raise UserError, naming the parameter and its allowed values, unless all fit the model."""
        verify(self, "method")
        name = self.short_name()
        if self.needs.rope or self.needs.plain:
            rope.check_rope(
                lm, name, plain=self.needs.plain, by_hand=self.needs.by_hand
            )
        elif self.needs.by_hand:
            families.require_attention_interface(lm.model, name)
        if self.needs.full_attention:
            families.require_full_attention(lm.model, name, lm.context_window)

    def unchanged_length(self, lm: LM) -> int:
        """Tokens of the longest text that it reads as the unmodified model does; 0 where it changes every text."""
        return 0

    def without_effect(self, lm: LM, tokens: int) -> str:
        """Why texts of so many tokens are read under it as by the unmodified model; empty where they are not."""
        unchanged = self.unchanged_length(lm)
        if tokens > unchanged:
            return ""
        if unchanged >= lm.context_window:
            return "changes nothing in the window of this model"
        return f"changes texts of more than {unchanged} tokens"

    def caution(self, lm: LM, tokens: int) -> str:
        """What a user should know before texts of so many tokens are read under it; empty where nothing is."""
        return ""

    def prefill(self) -> "Method | None":
        """The method under which all tokens of a prompt but the last can run.

        Under it each token depends on those before it alone, so that prompts share the prefill of a common
        prefix, and methods with the same prefill share it too. None where a prompt has to be read at once.
        """
        return None

    def continuation(self) -> Continuation | None:
        """The change after the shared prefill, if there is no other; then several methods are decoded as one batch.

        None: it continues inside its own block, alone. So does a subclass, unless it overrides this.
        """
        return None

    def records(self) -> tuple[Collection[int], Collection[int]]:
        """Channels of the attention input to record in a shared prefill, and the layers to record them in."""
        return (), ()

    def folded(self, lm: LM) -> CheckpointChange | None:
        """The change of the checkpoint that has the same effect; None where there is none."""
        return None

    def twin(self) -> Self:
        """Return the nearest method that folds into a checkpoint; itself if it folds, or if there is none."""
        return self

    @contextmanager
    def applied(self, lm: LM) -> Iterator[LM]:
        """Apply the method inside a ``with`` block; leaving it, also by an exception, restores the model.

        Blocks nest in one thread; see :func:`posbench.model.guard.exclusive` for others and for crossed exits. With
        gradient checkpointing call ``backward()`` inside the block, too: it runs the forward again.
        """
        self.check(lm)
        with exclusive(lm, self.short_name(), self.changed(lm)):
            yield lm

    @abstractmethod
    def changed(self, lm: LM) -> AbstractContextManager[object]:
        """The block of :meth:`applied` for a model that :meth:`check` has accepted."""

    @abstractmethod
    def neutral(self) -> Self:
        """The same method with neutral parameters: the result of a search that kept the unmodified model."""


def bind_call(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a forward's call by name, including ``**kwargs``."""
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    extra = arguments.pop("kwargs", {})
    return arguments | extra


def input_shape(call: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of a forward's input ids or input embeddings."""
    tokens = call.get("input_ids")
    if tokens is None:
        tokens = call["inputs_embeds"]
    return tokens.shape[0], tokens.shape[1]
