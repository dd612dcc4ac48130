"""Dual chunk attention (ChunkLlama): positions within chunks, so that none exceeds those that were trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from posbench.errors import UserError
from posbench.late import Tensor, torch
from posbench.methods.relative_positions import Pairs, RelativePositions
from posbench.model.lm import LM
from posbench.schema import Tokens

NO_CHUNKS = 10**9
"""A chunk length that no text reaches."""


@dataclass(frozen=True, kw_only=True)
class DualChunkAttention(RelativePositions):
    """Cut a text into chunks of s tokens; positions start anew in each, and queries stand behind all earlier chunks.

    For the a-th token of a chunk and the b-th of its own or an earlier one, the relative position is a - b in the same
    chunk, min(a + s, M) - b with the chunk before (so the distance stays exact near its edge), and
    min(2 s - 1, M) - b with older chunks. A text of s tokens or fewer is read unchanged.

    Args:
        trained_length: L. None: the model's context window.
        variant: Defaults of s and M: ``paper`` s = 3/4 L and M = L - 1; ``official`` (the released program)
            s = 3/4 L - L // 8 and M = 3/4 L.
        chunk_length: s. None: the variant's.
        largest_position: M, the largest position of a query, s - 1 or more. None: the variant's.
        mscale: Scale queries and keys by m = 0.05 ln(N / L) + 1 in texts of N > L tokens, as the released program does
            for Llama. Each part of a text has the m of the length at which it was read, so that decoding differs from
            reading at once.

    Source: An et al., ICML 2024 (ChunkLlama, arXiv 2402.17463); released program HKUNLP/ChunkLlama, 2add4d7. Differs
    from source: left padding and prompts in pieces; weights of the parts stay in float32 (the program: bfloat16), and
    m does not outlive its text; a beam search, which reorders cached keys, gives them all the present m.
    """

    trained_length: Tokens | None = None
    variant: Literal["paper", "official"] = "paper"
    chunk_length: Tokens | None = None
    largest_position: Tokens | None = None
    mscale: bool = False

    @classmethod
    def example(cls, lm: LM) -> Self:
        """Chunks of twelve tokens, for short prompts."""
        return cls(trained_length=16)

    def neutral(self) -> Self:
        """One chunk for all texts, and no scale."""
        sizes = {"chunk_length": NO_CHUNKS, "largest_position": NO_CHUNKS}
        return replace(self, **sizes, mscale=False)  # type: ignore[arg-type]

    def check(self, lm: LM) -> None:
        """Refuse a largest position within the chunk.

        Raises:
            UserError: Names it.
        """
        super().check(lm)
        fitted = self.fitted(lm)
        if fitted._largest < fitted._chunk - 1:
            allowed = f"{fitted._chunk - 1} or more, the last position of a chunk"
            hint = "set method.chunk_length to less, or leave both out"
            raise UserError("method.largest_position", fitted._largest, allowed, hint)

    def fitted(self, lm: LM) -> Self:
        """The lengths that go with the model and the variant."""
        trained = self.trained_length or lm.context_window
        three_quarters = trained * 3 // 4
        chunk, largest = three_quarters, trained - 1
        if self.variant == "official":
            chunk, largest = three_quarters - trained // 8, three_quarters
        return replace(
            self,
            trained_length=trained,
            chunk_length=self.chunk_length or max(chunk, 1),
            largest_position=self.largest_position or max(largest, 1),
        )

    def unchanged_length(self, lm: LM) -> int:
        """s, or L where there is a scale and L is less."""
        fitted = self.fitted(lm)
        assert fitted.trained_length is not None, "fitted() sets it"
        return (
            min(fitted._chunk, fitted.trained_length) if self.mscale else fitted._chunk
        )

    @property
    def _chunk(self) -> int:
        assert self.chunk_length is not None, "fitted() comes first"
        return self.chunk_length

    @property
    def _largest(self) -> int:
        assert self.largest_position is not None, "fitted() comes first"
        return self.largest_position

    def query_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """Those for keys of the same chunk, of the one before, and of older ones."""
        chunk = self._chunk
        within = tokens % chunk
        before = (within + chunk).clamp(max=self._largest)
        older = torch.full_like(tokens, min(2 * chunk - 1, self._largest))
        return within, before, older

    def key_positions(self, tokens: Tensor) -> Sequence[Tensor]:
        """The token of its chunk."""
        return (tokens % self._chunk,)

    def select(self, scores: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """By the number of chunks between the two."""
        same, before, older = scores
        chunks = pairs.query // self._chunk - pairs.key // self._chunk
        return torch.where(chunks == 0, same, torch.where(chunks == 1, before, older))

    def query_factor(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """The scale m, where there is one."""
        return self.key_factor(length)

    def key_factor(self, length: Tensor) -> Tensor | None:
        """The scale m, where there is one."""
        if not self.mscale:
            return None
        assert self.trained_length is not None, "fitted() comes first"
        return 0.05 * (length / self.trained_length).log().clamp(min=0) + 1
