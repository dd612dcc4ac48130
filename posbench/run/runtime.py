"""Where and how a run runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from posbench.errors import UserError
from posbench.schema import MAX_COUNT, Count, Positive, Threads, Tokens, Whole

MEMORY_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])(i?)B")
"""A size as ``4GiB``, or with powers of 1000 as ``4GB``: number, prefix, and ``i`` for powers of 1024."""
SIZE_PREFIXES = " KMG"
NOT_LOCAL = ("memory", "partition", "account", "qos", "constraint", "setup", "more")
"""Keys of a cluster that do not apply to processes on this machine."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where ``posbench submit`` sends jobs, and the resources of each; no result depends on it.

    The fields are the keys of ``runtime.cluster.*``.
    """

    # ``local``: processes of this machine, all at once
    kind: Literal["slurm", "local"]
    # time limit of a job; one that reaches it goes into the queue again and resumes
    minutes: Count = 240
    cpus: Count = 1  # of each job
    # of each job; from 1 up, ``runtime.device=auto`` is cuda
    gpus: Annotated[int, Ge(0), Le(64)] = 0
    memory: Positive | None = None  # GB of each job; None: the partition's default
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    at_once: Count = 256  # jobs that run at the same time
    # whether a job that is preempted, or whose node fails, goes into the queue again
    requeue: bool = True
    # lines of shell in front, as ``module load cuda``
    setup: tuple[str, ...] = ()
    # further options of sbatch
    more: dict[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind != "local":
            return
        for name in NOT_LOCAL:
            value = getattr(self, name)
            if value:
                allowed = "left out with runtime/cluster=local"
                hint = f"leave out runtime.cluster.{name}"
                raise UserError(f"runtime.cluster.{name}", value, allowed, hint)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how to run. The fields are the keys of ``runtime.*``."""

    # ``auto`` (a GPU where there is one), ``cpu``, ``cuda``, ``cuda:1``
    device: str = "auto"
    # shards the model's layers over all visible GPUs, then memory, then disk; None puts all on ``device``.
    # ``auto`` and ``balanced`` share evenly, ``balanced_low_0`` spares the first GPU
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = (
        None
    )
    # for ``device_map``: memory by GPU number and ``cpu``, as in ``{0: 70GiB, cpu: 99GiB}``
    max_memory: dict[int | str, str] | None = None
    # prompts per forward at most (moves rounding, so it is part of a run's identity)
    batch_size: Count = 64
    # tokens per forward at most, padding and reply counted; None: no limit
    batch_tokens: Tokens | None = 16384
    # questions of each subset that are asked, at all positions and under all methods, before the next ones;
    # null: all in one round (moves rounding, too)
    round_questions: Count | None = None
    # ``decided``: ask no more rounds once the shape of the position bias is known, at an error rate of 5 %
    # however often that is looked at; null: ask all questions
    until: Literal["decided"] | None = None
    # memory for prefills that prompts and methods share; null: each prompt is read anew under each method
    # (moves rounding, too)
    share: str | None = "4GiB"
    # CPU threads; None takes the model's, or leaves torch's choice
    threads: Threads | None = None
    # whether a run that charges starts without asking, as the flag --yes says
    yes: bool = False
    outputs: str = "outputs"  # folder that receives the runs
    # seconds between lines of progress where there is no terminal; 0: no such lines
    log_every: Whole = 30
    # examples per gold position whose attention is measured
    intervene_examples: Count = 20
    # bootstrap draws behind an interval; of fewer than 100 less than three lie beyond each of its ends
    resamples: Annotated[int, Ge(100), Le(MAX_COUNT)] = 2000

    # processes that share out the prompts of intervene and evaluate, each with a GPU of its own where there
    # are GPUs, and with ``threads`` CPU threads, or its share of torch's
    workers: Annotated[int, Ge(1), Le(64)] = 1
    cluster: Cluster | None = None  # for ``posbench submit``: runtime/cluster=slurm

    def __post_init__(self) -> None:
        if self.device_map and self.device not in ("auto", "cuda"):
            allowed = f"null with runtime.device={self.device}: it spreads over all visible GPUs"
            hint = "set runtime.device=auto, and choose GPUs with CUDA_VISIBLE_DEVICES"
            raise UserError("runtime.device_map", self.device_map, allowed, hint)
        if self.until and not self.round_questions:
            hint = "set runtime.round_questions=10, too"
            allowed = "null without runtime.round_questions"
            raise UserError("runtime.until", self.until, allowed, hint)
        if self.until and self.workers > 1:
            allowed = (
                "null where processes share out a run: each sees a part of the replies"
            )
            raise UserError(
                "runtime.until", self.until, allowed, "set runtime.workers=1"
            )
        if self.share is not None and not MEMORY_SIZE.fullmatch(self.share):
            allowed = "a size in KiB, MiB or GiB, or null"
            hint = "set runtime.share=4GiB, or runtime.share=null"
            raise UserError("runtime.share", self.share, allowed, hint)
        if self.max_memory:
            self._check_max_memory(self.max_memory)

    def _check_max_memory(self, sizes: dict[int | str, str]) -> None:
        devices_valid = all(isinstance(key, int) or key == "cpu" for key in sizes)
        sizes_valid = all(MEMORY_SIZE.fullmatch(size) for size in sizes.values())
        if not (self.device_map and devices_valid and sizes_valid):
            allowed = "null, or with device_map: GPU numbers and cpu, each with a size in KiB, MiB or GiB"
            hint = "set runtime.device_map=auto runtime.max_memory={0:70GiB,cpu:100GiB}"
            raise UserError("runtime.max_memory", sizes, allowed, hint)

    @property
    def shared_bytes(self) -> int:
        """``share``, the memory for prefills that prompts share (such as ``2GB``), in bytes; 0: nothing is shared."""
        if self.share is None:
            return 0
        match = MEMORY_SIZE.fullmatch(self.share)
        assert match is not None, "checked when it was made"
        number, prefix, binary = match.groups()
        # 1 GiB is 1024 MiB, 1 GB is 1000 MB.
        base = 1024 if binary else 1000
        return int(float(number) * base ** SIZE_PREFIXES.index(prefix))
