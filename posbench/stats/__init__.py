"""Intervals, correlations, position bias, tables of scores, and what they say about a claim."""
