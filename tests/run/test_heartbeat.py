"""What a command says of itself while it prints nothing else, on a clock that the test moves."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from posbench.run import heartbeat as module
from posbench.run import progress
from posbench.run.heartbeat import Heartbeat, doing, loading, showing_bar, sign_of_life


class Life:
    """A heartbeat without a thread: ``wait`` looks once in each second of a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lines: list[tuple[float, str]] = []
        monkeypatch.setattr(progress, "clock", lambda: self.now)
        self.heartbeat = Heartbeat(lambda text: self.lines.append((self.now, text)))
        monkeypatch.setattr(module, "_current", [self.heartbeat])

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.heartbeat.look()


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


def test_silence_never_lasts_longer_than_ten_seconds_at_first(life: Life) -> None:
    """Whatever phases follow one another, each shorter than that."""
    with doing("all"):
        for number in range(20):
            with doing(f"phase {number}"):
                life.wait(3)
    times = [0.0, *(at for at, _ in life.lines), life.now]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 10
    first = life.lines[0]
    assert first == (7.0, "phase 2, 1 s elapsed")


def test_a_long_phase_is_said_again_at_the_interval(life: Life) -> None:
    with doing("reading"):
        life.wait(100)
    assert [at for at, _ in life.lines] == [7.0, 37.0, 67.0, 97.0]
    assert life.lines[1][1] == "reading, 37 s elapsed"


def test_what_is_printed_elsewhere_counts(life: Life) -> None:
    with doing("reading"):
        for _ in range(10):
            life.wait(5)
            sign_of_life()
    assert life.lines == []


def test_the_innermost_activity_is_said_and_ends_with_its_block(life: Life) -> None:
    with doing("outer"):
        with pytest.raises(ValueError, match="x"), doing("inner"):
            raise ValueError("x")
        life.wait(8)
    life.wait(60)
    assert [text for _, text in life.lines] == ["outer, 7 s elapsed"]


def test_a_bar_and_an_interval_of_zero_are_silent(life: Life) -> None:
    with doing("reading"):
        with showing_bar():
            life.wait(60)
        assert life.lines == []
        module.set_interval(0)
        life.wait(60)
    assert life.lines == []


def test_an_activity_says_what_is_true_when_it_is_said(life: Life) -> None:
    read = 0
    with doing(lambda: f"{read} tokens read", is_timed=False):
        life.wait(5)
        read = 12
        life.wait(5)
    assert life.lines == [(7.0, "12 tokens read")]


def test_without_a_heartbeat_nothing_is_kept() -> None:
    with doing("reading"):
        assert module._current == []


def test_loading_says_the_share_of_the_tensors(life: Life) -> None:
    from transformers.utils import logging

    if not hasattr(logging, "set_tqdm_hook"):
        pytest.skip("this version of transformers tells nothing")
    logging.disable_progress_bar()
    with loading("mine", Console(file=io.StringIO())):
        for number, _ in enumerate(logging.tqdm([*range(50)], desc="weights")):
            if number == 19:
                life.wait(8)
    assert life.lines == [(7.0, "loading mine: 38 %, 7 s elapsed")]
    # Afterwards bars are transformers' own again.
    assert type(logging.tqdm([1])).__module__ != module.__name__


def test_a_model_loads_behind_that_hook(life: Life, checkpoint: Path) -> None:
    import posbench

    plain = posbench.load(str(checkpoint)).model.state_dict()
    with loading("random", Console(file=io.StringIO())):
        life.heartbeat.look()
        state = posbench.load(str(checkpoint)).model.state_dict()
    assert all(bool((plain[name] == state[name]).all()) for name in plain)


def test_a_run_says_what_it_does(
    posbench: Callable[..., object],
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every phase of a run is named: with no silence allowed, each look finds one."""
    said: list[str] = []
    look = Heartbeat.look

    def look_at_once(self: Heartbeat) -> None:
        if self.activities:
            said.append(self.activities[-1].text())
        look(self)

    monkeypatch.setattr(Heartbeat, "look", look_at_once)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.002)
    result = posbench(*small, "stages=[evaluate,report]", "method=none")
    assert result.status == 0  # type: ignore[attr-defined]
    for phase in ("loading libraries", "checking the config", "evaluate", "report"):
        assert any(text.startswith(phase) for text in said), phase
