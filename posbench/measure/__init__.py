"""Measurements on a model: replies, attention to items, hidden states, losses. No config and no files."""
