"""Scores of a reply against a gold text, in 0..1, shared by several benchmarks.

Each function follows the benchmark's released evaluation, whose quirks are part of the published numbers.
"""

from __future__ import annotations

import logging
import re
import string
import sys
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

WHOLE_REPLY = "whole_reply"
"""The metric that reads all of a reply, where the benchmark reads its first line."""
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_SCRIPTS_WITHOUT_BOUNDARIES = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH"),
    *("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "HANGUL"),
)
"""Prefixes of Unicode names of letters written without spaces between words, or (Korean) with attached endings."""
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WITHOUT_CHINESE_PUNCTUATION = str.maketrans(
    "", "", string.punctuation + _CHINESE_PUNCTUATION
)


def contains_answer(
    reply: str, answers: Iterable[str], *, whole_words: bool = False
) -> bool:
    """Whether one of the answers occurs in a reply; letter case, and how accents are encoded, do not count.

    Args:
        reply: The reply.
        answers: The answers, not empty.
        whole_words: Whether ``no`` is not part of ``know``, nor ``42`` of ``1429``: no letter or digit may touch one
            that an answer begins or ends with. In Chinese, Japanese, Thai and other scripts without spaces, and in
            Korean, an answer may occur anywhere.
    """
    plain_reply = _comparable(reply)
    occurs = occurs_as_word if whole_words else str.__contains__
    return any(occurs(plain_reply, _comparable(answer)) for answer in answers)


def occurs_as_word(text: str, answer: str) -> bool:
    """Whether an answer occurs in a text with no letter or digit next to one that it begins or ends with."""
    start = text.find(answer)
    while start >= 0:
        end = start + len(answer)
        joined_before = _has_boundary(answer[0]) and _has_boundary(
            text[start - 1 : start]
        )
        joined_after = _has_boundary(answer[-1]) and _has_boundary(text[end : end + 1])
        if not joined_before and not joined_after:
            return True
        start = text.find(answer, start + 1)
    return False


def _has_boundary(character: str) -> bool:
    """Whether a character is a letter, mark or digit of a script that ends its words; False for an empty text."""
    if not character or unicodedata.category(character)[0] not in "LMN":
        return False
    return not unicodedata.name(character, "").startswith(_SCRIPTS_WITHOUT_BOUNDARIES)


def _comparable(text: str) -> str:
    """Lower case, letters with accents as one character each."""
    return unicodedata.normalize("NFC", text.lower())


def normalize_answer(text: str) -> str:
    """Lower case; ASCII punctuation, then a, an, the left out; white space collapsed (SQuAD)."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    without_articles = re.sub(r"\b(a|an|the)\b", " ", plain)
    return " ".join(without_articles.split())


def _without_punctuation(text: str) -> str:
    """:func:`normalize_answer` with its articles."""
    return " ".join(text.lower().translate(_WITHOUT_PUNCTUATION).split())


def _with_punctuation(text: str) -> str:
    """:func:`normalize_answer` with its articles and punctuation."""
    return " ".join(text.lower().split())


def normalizer_of(answer: str) -> Callable[[str], str]:
    """Return the function that normalises an answer and the replies that it is compared with.

    That is :func:`normalize_answer` unless nothing of the answer is left by it ("A", "The The", "?"): then articles are
    kept, or these and punctuation.
    """
    for normalize in (normalize_answer, _without_punctuation):
        if normalize(answer):
            return normalize
    return _with_punctuation


def best_subspan_em(
    reply: str,
    answers: Sequence[str],
    *,
    strip_first: bool = True,
    whole_reply: bool = False,
) -> float:
    """1 where a normalised answer is part of the reply's first line, else 0 (Liu et al. 2023): 13 is in 1300.

    An answer that normalisation empties is in every reply by the released scripts; here it must occur as a word, see
    :func:`normalizer_of`.

    Args:
        reply: The reply.
        answers: The accepted answers, not blank.
        strip_first: White space goes before the reply is cut at its first line break, as in the script of Yu et al.
            (arXiv:2406.02536), not after, as in Liu et al., where a leading line break scores 0.
        whole_reply: Look at the whole reply.
    """
    text = reply if whole_reply else first_line(reply, strip_first=strip_first)
    return float(any(_has_normalized(text, answer) for answer in answers))


def _has_normalized(text: str, answer: str) -> bool:
    """Whether a normalised answer is part of the normalised text; as a word, if usual normalisation empties it."""
    normalize = normalizer_of(answer)
    if normalize is normalize_answer:
        return normalize(answer) in normalize(text)
    # "a" is in nearly every reply, though not as a word.
    word = re.escape(normalize(answer))
    return bool(word) and bool(re.search(rf"(?<!\w){word}(?!\w)", normalize(text)))


def first_line(reply: str, *, strip_first: bool) -> str:
    """The first line of a reply, or of the reply without white space around it."""
    if strip_first:
        reply = reply.strip()
    return reply.split("\n", 1)[0]


def qa_f1(reply: str, gold: str) -> float:
    """F1 of the two bags of words after :func:`normalize_answer` (LongBench; SQuAD's token F1).

    Where it leaves nothing of the gold text every reply scores 0 in the benchmark; here see :func:`normalizer_of`.
    """
    normalize = normalizer_of(gold)
    return _f1(normalize(reply).split(), normalize(gold).split())


def qa_f1_zh(reply: str, gold: str) -> float:
    """Return F1, 0..1, of the two bags of words that jieba cuts Chinese text into (LongBench).

    The raw text is cut first; then each word is put in lower case and loses punctuation and white space. The
    benchmark's set of Chinese punctuation lacks ``《``, so that one counts as a word. A gold text of nothing but
    punctuation keeps it, and so do the replies; in the benchmark every reply scores 0 then.
    """
    keeps_signs = not _chinese_words(gold)
    return _f1(_chinese_words(reply, keeps_signs), _chinese_words(gold, keeps_signs))


def _chinese_words(text: str, keeps_signs: bool = False) -> list[str]:
    """Return the words of a Chinese text for :func:`qa_f1_zh`, with or without punctuation."""
    words = []
    for word in _cut(text):
        plain = word.lower()
        if not keeps_signs:
            plain = plain.translate(_WITHOUT_CHINESE_PUNCTUATION)
        words.append("".join(plain.split()))
    return [word for word in words if word]


def _f1(reply_words: Sequence[str], gold_words: Sequence[str]) -> float:
    """Return the F1 score of two bags of words, 0..1; 0 without a common word."""
    common = (Counter(reply_words) & Counter(gold_words)).total()
    if not common:
        return 0.0
    precision = common / len(reply_words)
    recall = common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def _cut(text: str) -> list[str]:
    """Return the words of a Chinese text, in jieba's default mode and with its own dictionary."""
    with warnings.catch_warnings():
        # Its source has escapes that newer Pythons warn about, and it asks for pkg_resources.
        warnings.simplefilter("ignore")
        import jieba

    jieba.setLogLevel(logging.WARNING)
    return list(jieba.cut(text, cut_all=False))


def rouge_l(reply: str, gold: str) -> float:
    """Return ROUGE-L F, 0..1, as in LongBench: summary level, split at full stops, no stemming, letter case kept.

    This is PyPI ``rouge`` 1.0.1; Google's ``rouge_score`` gives other numbers. If one side has nothing but full stops
    the package raises, and the score is 0 as in the benchmark. It recurses once per word of a sentence: the official
    program scores 0 over Python's limit (about 1000 words), this one raises it.

    Args:
        reply: The model's reply.
        gold: A right answer.
    """
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + len(reply.split()) + len(gold.split()))
    try:
        scores = Rouge(metrics=["rouge-l"]).get_scores([reply], [gold], avg=True)
        return float(scores["rouge-l"]["f"])
    except ValueError:
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def rouge_l_zh(reply: str, gold: str) -> float:
    """:func:`rouge_l` of the words that jieba finds, joined by spaces (LongBench)."""
    return rouge_l(" ".join(_cut(reply)), " ".join(_cut(gold)))


def classification(reply: str, gold: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes in the reply, if the gold one is among them, else 0 (LongBench).

    A class that is part of the gold class's name does not count, except right after another such one: the
    benchmark removes from the list that it walks through, and so skips the next entry.
    """
    named = [name for name in classes if name in reply]
    for name in named:
        if name in gold and name != gold:
            named.remove(name)
    return 1.0 / len(named) if gold in named else 0.0


def retrieval(reply: str, gold: str) -> float:
    """:func:`number_share` of the paragraph's number in the gold text, which must have one (LongBench)."""
    number = re.search(r"(?:Paragraph |段落)(\d+)", gold)
    if not number:
        raise ValueError(f"no Paragraph with a number in {gold!r}")
    return number_share(reply, number[1])


def number_share(reply: str, gold: str) -> float:
    """Share of the numbers in the reply that are the gold one; 0 without any (LongBench)."""
    numbers = re.findall(r"\d+", reply)
    if not numbers:
        return 0.0
    return numbers.count(gold) / len(numbers)


def code_similarity(reply: str, gold: str) -> float:
    """Return the indel similarity, 0..1, of the gold line and the first line of code in the reply (LongBench).

    That is the first line, after leading line breaks, without a backtick, ``#`` or ``//``. Whole percent, as
    fuzzywuzzy with python-Levenshtein rounds; without that package its numbers differ.
    """
    from rapidfuzz import fuzz

    for line in reply.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")):
            return round(fuzz.ratio(line, gold)) / 100
    return round(fuzz.ratio("", gold)) / 100


def rouge_triple(reply: str, gold: str) -> tuple[float, float, float]:
    """Return the F scores of ROUGE-1, ROUGE-2 and ROUGE-L by Google's ``rouge_score``, no stemming (ZeroSCROLLS)."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    scores = scorer.score(gold, reply)
    return (
        scores["rouge1"].fmeasure,
        scores["rouge2"].fmeasure,
        scores["rougeL"].fmeasure,
    )


def ascii_f1(reply: str, gold: str) -> float:
    """Return :func:`qa_f1` (F1 of the bags of words, 0..1) of the two texts transliterated to ASCII (ZeroSCROLLS).

    The benchmark does so with Unidecode (GPL), this with anyascii (ISC). They agree on accented letters,
    quotes and dashes, not on rare characters nor on Chinese, where Unidecode puts a space after a syllable.
    A gold text that has no transliteration is compared as it is.

    Args:
        reply: The model's reply.
        gold: A right answer.
    """
    from anyascii import anyascii

    ascii_gold = anyascii(gold)
    if not ascii_gold.strip():
        return qa_f1(reply, gold)
    return qa_f1(anyascii(reply), ascii_gold)


def letter(text: str) -> str:
    """Return the first of A, B, C, D that is a word of its own; empty if there is none (ZeroSCROLLS QuALITY)."""
    match = re.search(r"\b[ABCD]\b", text)
    return match[0] if match else ""


def percentage(text: str) -> float | None:
    """The first percentage, as a fraction; None if there is none."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*%", text)
    return float(match[1]) / 100 if match else None


def exponential_similarity(reply: str, gold: str) -> float:
    """2 to the power of -10 times the distance of two percentages as fractions; 0 without (ZeroSCROLLS)."""
    reply_share = percentage(reply)
    gold_share = percentage(gold)
    if reply_share is None or gold_share is None:
        return 0.0
    return float(2 ** (-10 * abs(reply_share - gold_share)))


def parse_order(text: str) -> list[int]:
    """Return the whole numbers of a list such as ``2, 1, 3``, whatever text is around them."""
    digits = re.sub(r"[^0-9, ]", "", text)
    return [int(number) for number in re.findall(r"[0-9]+", digits)]


def concordance_index(reply: str, gold: str) -> float:
    """Return the share of the pairs of items that a reply has in the gold order (ZeroSCROLLS).

    0 if the reply is no permutation of the gold items.
    """
    reply_order = parse_order(reply)
    gold_order = parse_order(gold)
    if sorted(reply_order) != sorted(gold_order) or len(gold_order) < 2:
        return 0.0
    # Of an item that occurs several times, the last index.
    index = {item: i for i, item in enumerate(reply_order)}
    pairs = list(combinations(gold_order, 2))
    return sum(index[first] < index[second] for first, second in pairs) / len(pairs)
