"""Synthetic training: the embedded tiny models and their recipe."""
