"""Intervals, and tables of scores."""
