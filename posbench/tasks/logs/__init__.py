"""Retrieval logs as libraries write them, read into one form."""

from posbench.tasks.logs.base import Log, LoggedDocument, LoggedQuestion, Problem
from posbench.tasks.logs.read import read_log

__all__ = ["Log", "LoggedDocument", "LoggedQuestion", "Problem", "read_log"]
