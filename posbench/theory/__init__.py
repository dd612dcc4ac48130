"""Theory without a trained model: masks and RoPE (Wu et al. 2025), the causal mask alone (Behind RoPE)."""
