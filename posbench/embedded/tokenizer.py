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
PIECES: tuple[str, ...] = (OPEN, COLON, COMMA, ASK, IS, QUOTE, END, UNKNOWN)
VOCAB: dict[str, int] = {piece: i for i, piece in enumerate((*PIECES, *WORDS))}
FIRST_WORD = len(PIECES)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, without a beginning-of-sequence token; 4 tokens per pair and ``4 * n + 3`` per prompt.

    Text outside the vocabulary becomes one ``<|unk|>`` per character. Only ``<|end|>`` and ``<|unk|>`` are
    special: an added token is cut out before the pattern runs, so a special ``"`` would break the longer
    pieces.
    """
    # Longest first: an alternation takes the first branch that matches, and `"` begins most pieces.
    known = sorted((*PIECES[:6], *WORDS), key=len, reverse=True)
    escaped = [
        "".join(c if c.isalnum() or c in '" :,' else "\\" + c for c in piece)
        for piece in known
    ]
    tokenizer = Tokenizer(models.WordLevel(vocab=dict(VOCAB), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*escaped, "[\\s\\S]"])), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": END, "pad_token": END, "unk_token": UNKNOWN}
    settings = {
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **settings)
