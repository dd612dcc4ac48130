"""The machine that a number was made on."""

from __future__ import annotations

import platform
from pathlib import Path

from posbench.late import torch


def hardware() -> str:
    """One line that names the processor and the accelerators."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    threads = torch.get_num_threads()
    parts = [f"{name}, {threads} thread{'s' * (threads > 1)}"]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "; ".join([*parts, ", ".join(gpus)] if gpus else parts)
