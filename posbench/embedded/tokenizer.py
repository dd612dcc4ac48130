"""The tokenizer: one piece for each structural string of the prompt and one for each word of the lexicon."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posbench.tasks.kv_retrieval import WORDS

OPEN = 'Json data: {"'
COLON = '": "'
COMMA = '", "'
ASK = '"} The value of key "'
IS = '" is "'
QUOTE = '"'
END = "<|end|>"
UNKNOWN = "<|unk|>"
_TEXT_PIECES = (OPEN, COLON, COMMA, ASK, IS, QUOTE)
PIECES: tuple[str, ...] = (*_TEXT_PIECES, END, UNKNOWN)
VOCAB: dict[str, int] = {piece: i for i, piece in enumerate((*PIECES, *WORDS))}
FIRST_WORD = len(PIECES)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, without a beginning-of-sequence token; 4 tokens per pair and ``4 * n + 3`` per prompt.

    Text outside the vocabulary becomes one ``<|unk|>`` per character. Only ``<|end|>`` and ``<|unk|>`` are
    special: an added token is cut out before the pattern runs, so a special ``"`` would break the longer
    pieces.
    """
    # Longest first: an alternation takes the first branch that matches, and `"` begins most pieces.
    pieces = sorted((*_TEXT_PIECES, *WORDS), key=len, reverse=True)
    any_character = "[\\s\\S]"
    pattern = "|".join([*map(_escape, pieces), any_character])
    tokenizer = Tokenizer(models.WordLevel(vocab=dict(VOCAB), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _escape(piece: str) -> str:
    """A regular expression for a piece; only special characters of the pattern's syntax are escaped."""
    plain = '" :,'
    return "".join(c if c.isalnum() or c in plain else "\\" + c for c in piece)
