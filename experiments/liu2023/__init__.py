"""Liu et al. 2023."""
