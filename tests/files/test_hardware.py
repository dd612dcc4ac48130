"""The most memory that a process held, against what the kernel says of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posbench.files import hardware
from posbench.files.hardware import peak_memory, reset_resident_peak, resident_peak


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="the kernel does not tell"
)
def test_resident_memory_is_the_kernels_high_water_mark() -> None:
    # In a process of its own, as another test may let the kernel count this one's peak anew, and behind a shell, as a
    # process begins with the peak of the one that started it. The first call loads torch.
    code = (
        "from pathlib import Path; from posbench.files.hardware import peak_memory; "
        "block = b'x' * 10**8; del block; peak_memory(); "
        "print(peak_memory()['resident'], Path('/proc/self/status').read_text())"
    )
    shell = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, code]
    printed = subprocess.check_output(shell, text=True)
    (told,) = re.findall(r"VmHWM:\s+(\d+) kB", printed)
    assert int(printed.split()[0]) == pytest.approx(int(told) * 1024, rel=0.05)
    assert int(told) * 1024 > 10**8


@pytest.mark.skipif(not hardware.CLEAR_REFS.is_file(), reason="the kernel cannot")
def test_a_peak_counted_anew_is_that_of_what_follows() -> None:
    """The peak of the run, which is printed in its end, stays that of all its work."""
    size = 300_000_000
    assert reset_resident_peak()
    before = resident_peak()
    block = bytearray(size)
    high = resident_peak()
    assert before is not None and high is not None and high >= before + 0.9 * size
    del block
    assert reset_resident_peak()
    low = resident_peak()
    assert low is not None and low <= high - 0.9 * size
    assert peak_memory()["resident"] >= 0.95 * high


def test_where_the_kernel_counts_no_peak_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    assert not reset_resident_peak() and resident_peak() is None


def test_gpus_count_together_and_only_where_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "cuda" not in peak_memory()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {0: 5, 1: 7}.__getitem__)
    assert peak_memory()["cuda"] == 12
