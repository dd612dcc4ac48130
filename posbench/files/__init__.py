"""Whole files, hashes, Markdown, the machine, and where files come from."""
