"""ReRoPE and Leaky ReRoPE: relative positions stop at a window's edge, or grow slowly behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from annotated_types import Ge

from posbench.late import Tensor, torch
from posbench.methods.relative_positions import (
    Pairs,
    RelativePositions,
    default_window,
    log_factor,
)
from posbench.model.lm import LM
from posbench.schema import Several, Tokens


@dataclass(frozen=True, kw_only=True)
class ReRoPE(RelativePositions):
    """Give tokens at a distance of W or more the relative position W (ReRoPE), or one that grows k times slower.

    At distance d = i - j the relative position is min(d, W), or with ``compression`` k (Leaky ReRoPE) d for d < W,
    else W + (d - W) / k. Queries are scaled by max(1, ln(i + 1) / ln T) for T trained tokens, which changes a text
    that is longer than T.

    Args:
        window: W. A text of W tokens or fewer is read unchanged. None: 512, or an eighth of ``trained_length`` below
            4096.
        compression: k; 1 changes nothing, the released program has 16. None: ReRoPE.
        log_scale: Whether queries are scaled.
        trained_length: T. None: the model's context window.

    Source: Su 2023 (ReRoPE); released program bojone/rerope, acfe788. Differs from source: the model's own base and
    kind of rotary embedding (the program: 10000, whatever the model has); T from the model (the program: 4096).
    """

    window: Tokens | None = None
    compression: Annotated[float, Ge(1)] | None = None
    log_scale: bool = True
    trained_length: Several | None = None

    @classmethod
    def example(cls, lm: LM) -> Self:
        """A window of eight tokens, for short prompts."""
        return cls(window=8)

    def neutral(self) -> Self:
        """Positions that grow behind the window as before it, and no scale."""
        return replace(self, compression=1.0, log_scale=False)

    def fitted(self, lm: LM) -> Self:
        """The window and the trained length that go with the model."""
        trained = self.trained_length or lm.context_window
        window = self.window or default_window(trained, divisor=8)
        return replace(self, window=window, trained_length=trained)

    def unchanged_length(self, lm: LM) -> int:
        """W, or T where queries are scaled and T is less."""
        fitted = self.fitted(lm)
        assert fitted.window is not None, "fitted() sets it"
        assert fitted.trained_length is not None, "fitted() sets it"
        if not self.log_scale:
            return fitted.window
        return min(fitted.window, fitted.trained_length)

    def query_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are, and those for distances of W and more."""
        assert self.window is not None, "fitted() comes first"
        if self.compression is None:
            return tokens, torch.full_like(tokens, self.window)
        shift = self.window - self.window / self.compression
        return tokens, tokens / self.compression + shift

    def key_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are, and those for distances of W and more."""
        if self.compression is None:
            return tokens, torch.zeros_like(tokens)
        return tokens, tokens / self.compression

    def select(self, scores: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """The second way from a distance of W on."""
        near, far = scores
        return torch.where(pairs.distance < self.window, near, far)

    def query_factor(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """The scale, where there is one."""
        if not self.log_scale:
            return None
        assert self.trained_length is not None, "fitted() comes first"
        return log_factor(tokens, self.trained_length)
