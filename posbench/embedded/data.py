"""Training data: whole batches drawn as tensors.

One context carries many questions. Each is a block of five tokens (``"} The value of key "``, key,
``" is "``, value, ``"``) that continues the context at the same positions and sees the context and itself
only, so that Q questions equal Q separate prompts at a fraction of the work.
"""

from __future__ import annotations

from dataclasses import dataclass

from posbench.embedded.tokenizer import (
    ASK,
    COLON,
    COMMA,
    FIRST_WORD,
    IS,
    OPEN,
    QUOTE,
    VOCAB,
)
from posbench.late import Tensor, torch
from posbench.tasks.kv_retrieval import WORDS

BLOCK = 5  # tokens of one question with its answer and closing quote


@dataclass(frozen=True)
class Batch:
    """One batch of contexts with questions.

    Attributes:
        ids: Token ids, [contexts, 4 * pairs + 5 * questions]: the context, then the blocks.
        gold: Gold positions, [contexts, questions].
        pairs: Key-value pairs per context.
    """

    ids: Tensor
    gold: Tensor
    pairs: int

    @property
    def blocks(self) -> Tensor:
        """Token ids of the blocks, [contexts, questions, 5]."""
        return self.ids[:, 4 * self.pairs :].view(self.ids.shape[0], -1, BLOCK)


def end_prior(pairs: int, scale: float, mix: float) -> Tensor:
    """Probabilities of the gold position, [pairs]: the ends' prior mixed with ``mix`` of uniform."""
    x = (torch.arange(pairs) + 0.5) / pairs
    weight = torch.exp(-x / scale) + torch.exp(-(1 - x) / scale)
    return (1 - mix) * weight / weight.sum() + mix / pairs


def _draw_words(contexts: int, pairs: int, rng: torch.Generator) -> Tensor:
    """Distinct words of each context, [contexts, pairs]."""
    order = torch.rand(contexts, len(WORDS), generator=rng).argsort(-1)
    return order[:, :pairs] + FIRST_WORD


def draw_contexts(
    contexts: int, pairs: int, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Contexts, [contexts, 4 * pairs], with their keys and their values, each distinct, [contexts, pairs]."""
    keys = _draw_words(contexts, pairs, rng)
    values = _draw_words(contexts, pairs, rng)
    colon = torch.full_like(keys, VOCAB[COLON])
    comma = torch.full_like(keys, VOCAB[COMMA])
    comma[:, 0] = VOCAB[OPEN]
    return torch.stack([comma, keys, colon, values], -1).flatten(1), keys, values


def draw_batch(
    contexts: int,
    pairs: int,
    questions: int,
    prior: Tensor,
    noise: float,
    rng: torch.Generator,
) -> Batch:
    """Draw a batch.

    Args:
        contexts: Number of contexts.
        pairs: Key-value pairs per context.
        questions: Questions per context.
        prior: Probabilities of the gold position, [pairs].
        noise: Share of questions whose key is a random word; the answer stays.
        rng: Generator, on the CPU.
    """
    context, keys, values = draw_contexts(contexts, pairs, rng)
    gold = torch.multinomial(
        prior, contexts * questions, replacement=True, generator=rng
    )
    gold = gold.view(contexts, questions)
    question_keys = keys.gather(1, gold)
    if noise:
        shape = (contexts, questions)
        wrong = torch.rand(shape, generator=rng) < noise
        random_words = torch.randint(len(WORDS), shape, generator=rng) + FIRST_WORD
        question_keys = torch.where(wrong, random_words, question_keys)
    pieces = [
        torch.full_like(gold, VOCAB[ASK]),
        question_keys,
        torch.full_like(gold, VOCAB[IS]),
        values.gather(1, gold),
        torch.full_like(gold, VOCAB[QUOTE]),
    ]
    blocks = torch.stack(pieces, -1).flatten(1)
    return Batch(torch.cat([context, blocks], 1), gold, pairs)


def block_mask(context_length: int, questions: int) -> Tensor:
    """Whether a row may see a column, [T, T]: causal, and no block sees another block."""
    index = torch.arange(context_length + BLOCK * questions)
    block = torch.where(index < context_length, -1, (index - context_length) // BLOCK)
    return (index[:, None] >= index) & ((block == -1) | (block == block[:, None]))


def block_positions(context_length: int, questions: int) -> Tensor:
    """Position ids, [T]: every block continues the context at the same positions."""
    in_block = torch.arange(BLOCK).repeat(questions)
    return torch.cat([torch.arange(context_length), context_length + in_block])
