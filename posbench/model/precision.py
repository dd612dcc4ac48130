"""Whether a CPU multiplies matrices faster in bfloat16 than in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from posbench.late import Tensor, torch

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in ``/proc/cpuinfo`` of instructions that multiply bfloat16: of x86, of x86 with AMX, of ARM."""
TIMED_ROWS = 256
TIMED_ROUNDS = 5

Timer = Callable[[Tensor, Tensor], float]
"""Seconds of the product of two matrices."""


def has_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether the processor has instructions for bfloat16; False where the system does not list them.

    Args:
        cpu_info: The file in which Linux lists them.
    """
    if not cpu_info.is_file():
        return False
    for line in cpu_info.read_text("utf-8").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features") and BFLOAT16_FLAGS & {*flags.split()}:
            return True
    return False


def time_product(left: Tensor, right: Tensor) -> float:
    """Return the shortest of a few times of a matrix product, in seconds; the first one warms up and does not count."""
    times = []
    for _ in range(1 + TIMED_ROUNDS):
        started = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - started)
    return min(times[1:])


def bfloat16_speedup(width: int, timer: Timer = time_product) -> float:
    """Return how many times as fast this CPU multiplies in bfloat16 as in float32.

    Args:
        width: Hidden size of the model: one of its feed-forward products is timed.
        timer: Seconds of a product.
    """
    tokens = torch.ones(TIMED_ROWS, width)
    weights = torch.ones(width, 4 * width)
    plain = timer(tokens, weights)
    brief = timer(tokens.bfloat16(), weights.bfloat16())
    return plain / brief
