"""What holds for every first look at a result."""

from __future__ import annotations

from posbench.stats.glance import MAX_NUMBERS, MAX_WORDS, Glance


def check_glance(glance: Glance) -> None:
    """Fail unless a glance is one: a short sentence, a few numbers with units, a command."""
    sentence = glance.sentence
    assert len(sentence.split()) <= MAX_WORDS, sentence
    assert sentence.endswith(".") and sentence[:-1].strip(), sentence
    assert "\n" not in sentence and "  " not in sentence, sentence
    assert "nan" not in sentence.replace(".", " ").split(), sentence
    assert glance.word and len(glance.word.split()) <= 8, glance.word
    assert glance.tone in ("good", "bad", "open")
    assert len(glance.numbers) <= MAX_NUMBERS, glance.numbers
    for number in glance.numbers:
        assert number.name and number.unit, number
        assert any(digit.isdigit() for digit in number.value), number
        assert "nan" not in number.value, number
    # An interval says what it rests on.
    has_interval = any("[" in number.value for number in glance.numbers)
    assert glance.sample or not has_interval, glance
    # A purpose says what a command does.
    assert not glance.purpose or glance.next.startswith("posbench "), glance
