"""Searches know nothing of models: they name candidates and choose among losses."""

from posbench.search.base import Search
from posbench.search.channel import Candidate, ChannelSearch
from posbench.search.genetic import GeneticSearch
from posbench.search.gradient import GradientSearch

__all__ = ["Candidate", "ChannelSearch", "GeneticSearch", "GradientSearch", "Search"]
