"""SelfExtend: far tokens share positions in groups, near ones keep theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from annotated_types import Gt

from posbench.late import Tensor, torch
from posbench.methods.relative_positions import (
    Pairs,
    RelativePositions,
    default_window,
    log_factor,
)
from posbench.model.lm import LM
from posbench.schema import Count, Tokens


@dataclass(frozen=True, kw_only=True)
class SelfExtend(RelativePositions):
    """Let keys at a distance of W or more share positions in groups of G.

    At distance d = i - j the relative position is d for d < W, else ``i // G - j // G + W - W // G``. A model trained
    on L positions so reads (L - W) G + W tokens. The authors choose G and W so that N tokens stay within
    W + (N - W) / G < L / 2 to 2 L / 3.

    Args:
        group_size: G, tokens of a group; 1 changes nothing.
        window: W, distances that stay as they are; a text of W tokens or fewer is read unchanged. None: 1024, or a
            quarter of a context window below 4096 tokens.
        scale_base: Base b of a scale of the queries by max(1, ln(i + 1) / ln b); the authors take the trained length,
            for long passkeys only. None: no scale.
        fractional_shift: Shift by ``W - W / G``, as some files of the released program do (Llama.py, Gemma.py, the
            flash prefill of Llama_4_40.py); it differs only where G does not divide W.

    Source: Jin et al., ICML 2024 (SelfExtend, arXiv 2401.01325); released program datamllab/LongLM, cdbbb06. Differs
    from source: left padding, batches and prompts in pieces give what a single prompt gives; prefill and decoding
    agree; a sliding window stays (the authors switch it off).
    """

    group_size: Count = 8
    window: Tokens | None = None
    scale_base: Annotated[float, Gt(1)] | None = None
    fractional_shift: bool = False

    @classmethod
    def example(cls, lm: LM) -> Self:
        """Groups of four tokens behind a window of eight, for short prompts."""
        return cls(group_size=4, window=8)

    def neutral(self) -> Self:
        """Groups of one token, and no scale."""
        return replace(self, group_size=1, scale_base=None)

    def fitted(self, lm: LM) -> Self:
        """The window that goes with the model."""
        window = self.window or default_window(lm.context_window, divisor=4)
        return replace(self, window=window)

    def unchanged_length(self, lm: LM) -> int:
        """W, or the base of the scale where that is less."""
        window = self.fitted(lm).window
        assert window is not None, "fitted() sets it"
        return window if self.scale_base is None else min(window, int(self.scale_base))

    def query_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are, and in groups, shifted so that they meet at the window's edge."""
        assert self.window is not None, "fitted() comes first"
        shift: float = self.window - self.window // self.group_size
        if self.fractional_shift:
            shift = self.window - self.window / self.group_size
        return tokens, tokens // self.group_size + shift

    def key_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are, and in groups."""
        return tokens, tokens // self.group_size

    def select(self, scores: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """Groups from a distance of W on."""
        near, far = scores
        return torch.where(pairs.distance < self.window, near, far)

    def query_factor(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """The scale, where there is one."""
        return None if self.scale_base is None else log_factor(tokens, self.scale_base)
