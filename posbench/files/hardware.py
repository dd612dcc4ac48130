"""The machine that a number was made on."""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path

from posbench.late import has_torch, torch

if sys.platform != "win32":
    import resource


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
        peaks["resident"] = unit_bytes * usage.ru_maxrss
    if has_torch() and torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        peaks["cuda"] = sum(torch.cuda.max_memory_allocated(i) for i in devices)
    return peaks
