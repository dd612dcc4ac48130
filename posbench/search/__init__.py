"""Searches for parameters of a method: one module and one YAML each."""
