"""Benchmarks: one module and one YAML each."""

from posbench.tasks.base import Example, Task
from posbench.tasks.kv_retrieval import KVRetrieval

__all__ = ["Example", "KVRetrieval", "Task"]
