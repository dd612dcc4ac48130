"""The machine that a number was made on."""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path

from posbench.late import torch

if sys.platform != "win32":
    import resource


def hardware() -> str:
    """One line that names what rounding depends on: the processor, the instruction set that torch uses of it,
    the number of threads, and the accelerators."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [
            line
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    threads = torch.get_num_threads()
    instructions = torch.backends.cpu.get_cpu_capability()
    parts = [f"{name}, {instructions}, {threads} thread{'s' * (threads > 1)}"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "; ".join([*parts, ", ".join(gpus)] if gpus else parts)


@cache
def default_threads() -> int:
    """CPU threads that torch takes by itself: as many as it had before any run of this process set others."""
    return int(torch.get_num_threads())


def peak_memory() -> dict[str, int]:
    """The most memory that this process has held so far, in bytes: ``resident``, and ``cuda`` on all GPUs."""
    found = {}
    if sys.platform != "win32":  # where the standard library cannot tell
        unit = 1 if sys.platform == "darwin" else 1024
        found["resident"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if torch.cuda.is_initialized():
        found["cuda"] = sum(
            map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
        )
    return found
