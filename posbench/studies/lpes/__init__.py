"""LPES."""
