"""Searches know nothing of models: they name candidates and choose among losses."""

from posbench.search.channel import Candidate, ChannelSearch

__all__ = ["Candidate", "ChannelSearch"]
