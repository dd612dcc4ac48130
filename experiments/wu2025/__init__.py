"""Wu et al. 2025."""
