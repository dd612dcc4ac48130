"""The machine that a number was made on."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from posbench.late import has_torch, torch

if sys.platform != "win32":
    import resource

CLEAR_REFS = Path("/proc/self/clear_refs")
"""Where Linux is told to count the peak of resident memory anew."""
_peak_before_reset = 0
"""Bytes."""


def describe_hardware() -> str:
    """Describe in one line the hardware that rounding depends on: processor, torch's instruction set, threads, GPUs."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    if not has_torch():
        return processor
    instructions = torch.backends.cpu.get_cpu_capability()
    num_threads = torch.get_num_threads()
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    text = f"{processor}, {instructions}, {threads}"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if gpus:
        text += f"; {', '.join(gpus)}"
    return text


@cache
def default_threads() -> int:
    """Return torch's default number of CPU threads, before any run of this process set another; 1 without torch."""
    if not has_torch():
        return 1
    return int(torch.get_num_threads())


def peak_memory() -> dict[str, int]:
    """Peak memory of this process so far, in bytes: ``resident``, and ``cuda`` on all GPUs."""
    peaks = {}
    if sys.platform != "win32":  # the standard library has no such call there
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        usage = resource.getrusage(resource.RUSAGE_SELF)
        peak = unit_bytes * usage.ru_maxrss
        peaks["resident"] = max(peak, _peak_before_reset)
    if has_torch() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        peaks["cuda"] = sum(torch.cuda.max_memory_allocated(i) for i in devices)
    return peaks


def reset_resident_peak() -> bool:
    """Count the peak of resident memory anew, for :func:`resident_peak`; False where the kernel cannot."""
    global _peak_before_reset
    earlier = peak_memory().get("resident", 0)
    try:
        # Freed memory that the allocator keeps would count for whatever is measured next.
        with suppress(AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    _peak_before_reset = earlier
    return True


def resident_peak() -> int | None:
    """The peak of this process's resident memory since the last reset, in bytes; None where the kernel does not say."""
    with suppress(OSError):
        text = CLEAR_REFS.with_name("status").read_text("utf-8")
        peak = re.search(r"VmHWM:\s+(\d+) kB", text)
        return 1024 * int(peak[1]) if peak else None
    return None
