"""Cost and precision of methods."""
