"""Yu et al. 2025."""
