"""The most memory that a process held, against what the kernel says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from posbench.files.hardware import peak_memory


@pytest.mark.skipif(
    not Path("/proc/self/status").is_file(), reason="the kernel does not tell"
)
def test_resident_memory_is_the_kernels_high_water_mark() -> None:
    before = peak_memory()["resident"]
    told = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert 0.95 * before <= int(told[0]) * 1024 <= 1.05 * peak_memory()["resident"]


def test_gpus_count_together_and_only_where_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "cuda" not in peak_memory()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {0: 5, 1: 7}.__getitem__)
    assert peak_memory()["cuda"] == 12
