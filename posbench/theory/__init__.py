"""Theory without a trained model: masks (Wu et al. 2025), the causal mask alone (Behind RoPE)."""
