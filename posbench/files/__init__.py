"""Whole files, hashes, the machine, and where files come from."""
