"""Analyses other than the benchmark: one module and one YAML each, by paper."""
