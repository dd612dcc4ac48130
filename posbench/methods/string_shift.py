"""STRING: far tokens take over relative positions that were trained more often."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from posbench.errors import UserError
from posbench.late import Tensor, torch
from posbench.methods.relative_positions import (
    Pairs,
    RelativePositions,
    default_window,
)
from posbench.model.lm import LM
from posbench.schema import Scale, Tokens

OFFICIAL_FACTOR = 0.1 * math.log(2) + 1
"""Factor of cos and sin in the released program."""
OFFSET_SHARE = 0.33
"""Offset, as a share of the trained length, in most scripts of the released program; the authors advise 0.25 to 0.4."""


@dataclass(frozen=True, kw_only=True)
class StringShift(RelativePositions):
    """Shift relative positions from S on down to W and more, inside the trained length.

    At distance d = i - j the relative position is d for d < S, else d - S + W. It shows only in texts of more than S
    tokens. Large relative positions are rare in training; those from W on are not.

    Args:
        trained_length: L, from which the others follow; the authors take the longest text of a test. None: the
            model's context window.
        offset: S. None: 0.33 L.
        local_window: W, up to S; at S nothing changes. None: 128, or L / 32 below 4096. The authors advise 128 to 512.
        variant: ``paper``, or ``official`` for two peculiarities of the released program: in a prompt, the key at
            distance S counts twice, as S and as W (generated tokens: once, as W), and the factor.
        attention_factor: Factor of queries and keys. None: 1 (paper) or 0.1 ln 2 + 1 (official, in texts of any
            length).

    Source: An et al. 2024 (STRING, arXiv 2410.18745); released program HKUNLP/STRING, 216cc2f. Differs from source:
    batches, left padding, texts shorter than S (the program fails); the model's own frequencies (the program has YaRN
    for Qwen2). An offset of 0, which switches the program off, is no value here: leave the method out.
    """

    trained_length: Tokens | None = None
    offset: Tokens | None = None
    local_window: Tokens | None = None
    variant: Literal["paper", "official"] = "paper"
    attention_factor: Scale | None = None

    @classmethod
    def example(cls, lm: LM) -> Self:
        """An offset of twelve tokens, for short prompts."""
        return cls(offset=12, local_window=4)

    def neutral(self) -> Self:
        """An offset that no text reaches, and the factor 1."""
        return replace(self, offset=10**9, attention_factor=1.0)

    def check(self, lm: LM) -> None:
        """Refuse a window that is larger than the offset.

        Raises:
            UserError: Names it.
        """
        super().check(lm)
        fitted = self.fitted(lm)
        window, offset = fitted.lengths
        if window > offset:
            allowed = f"1 to {offset}, the offset"
            hint = "set method.local_window to less, or method.offset to more"
            raise UserError("method.local_window", window, allowed, hint)

    def fitted(self, lm: LM) -> Self:
        """The lengths that go with the model, and the factor of the variant."""
        trained = self.trained_length or lm.context_window
        factor = OFFICIAL_FACTOR if self.variant == "official" else 1.0
        return replace(
            self,
            trained_length=trained,
            offset=self.offset or max(int(OFFSET_SHARE * trained), 1),
            local_window=self.local_window or default_window(trained, divisor=32),
            attention_factor=self.attention_factor or factor,
        )

    def unchanged_length(self, lm: LM) -> int:
        """S, or 0 with a factor, which changes every text."""
        fitted = self.fitted(lm)
        return fitted.lengths[1] if fitted.attention_factor == 1 else 0

    @property
    def lengths(self) -> tuple[int, int]:
        """W and S, once :meth:`fitted` has set them."""
        assert self.local_window is not None, "fitted() comes first"
        assert self.offset is not None, "fitted() comes first"
        return self.local_window, self.offset

    def query_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are, and shifted."""
        window, offset = self.lengths
        return tokens, tokens - offset + window

    def key_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """As they are."""
        return (tokens,)

    def select(self, scores: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """Shifted from a distance of S on."""
        near, shifted = scores
        _, offset = self.lengths
        selected = torch.where(pairs.distance < offset, near, shifted)
        if self.variant == "official" and pairs.is_prompt:
            # Two keys with the same value are one with the sum of their weights.
            both = torch.logaddexp(near, shifted)
            selected = torch.where(pairs.distance == offset, both, selected)
        return selected

    def query_factor(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """The square of the factor, for queries and keys together."""
        assert self.attention_factor is not None, "fitted() comes first"
        if self.attention_factor == 1:
            return None
        square = self.attention_factor**2
        return torch.full_like(length, square, dtype=torch.float32)
