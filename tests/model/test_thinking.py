"""Thinking in the texts of replies, as published models write it."""

from __future__ import annotations

import pytest

from posbench.model.thinking import opens_thinking, split_thinking

HARMONY = (
    "<|channel|>analysis<|message|>The key is B.<|end|><|start|>assistant"
    "<|channel|>final<|message|>C<|return|>"
)


@pytest.mark.parametrize(
    ("text", "opened", "answer", "thinking", "is_open", "form"),
    [
        ("C", False, "C", "", False, ""),
        ("<think>so B</think>\n\nC", False, "C", "so B", False, "inline"),
        ("so B</think>C", False, "C", "so B", False, "opened"),
        ("so B</think>C", True, "C", "so B", False, "opened"),
        ("<think>so B", False, "", "so B", True, "inline"),
        ("so B", True, "", "so B", True, "opened"),
        ("<think></think>C", False, "C", "", False, "inline"),
        ("[THINK]so B[/THINK]C", False, "C", "so B", False, "inline"),
        ("◁think▷so B◁/think▷C", False, "C", "so B", False, "inline"),
        # Only what follows the last thinking is the answer.
        ("<think>a</think>B<think>b</think>C", False, "C", "aBb", False, "inline"),
        ("<think>a</think>B<think>b", False, "B", "a\nb", True, "inline"),
        (HARMONY, False, "C", "The key is B.", False, "inline"),
        (HARMONY[:50], False, "", "The key is B.", True, "inline"),
        (
            "analysisThe key is B.assistantfinalC",
            False,
            "C",
            "The key is B.",
            False,
            "inline",
        ),
        # A word, and no mark.
        ("I think B", False, "I think B", "", False, ""),
        ("analysis of B", False, "analysis of B", "", False, ""),
    ],
)
def test_the_answer_is_what_follows_the_thinking(
    text: str, opened: bool, answer: str, thinking: str, is_open: bool, form: str
) -> None:
    assert split_thinking(text, opened) == (answer, thinking, is_open, form)


def test_a_template_that_begins_the_thinking_is_seen() -> None:
    assert opens_thinking("<|assistant|><think>\n")
    assert not opens_thinking("<|assistant|><think>\n\n</think>\n\n")
    assert not opens_thinking("Answer:")
