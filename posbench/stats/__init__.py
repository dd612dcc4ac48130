"""Intervals, correlations, position bias, tables of scores, and verdicts on claims."""
