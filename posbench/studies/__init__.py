"""Analyses beside the benchmark: one module and one YAML each, by paper."""
