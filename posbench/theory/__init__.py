"""What can be derived without a trained model: masks as graphs (Wu et al. 2025) and the causal mask alone (Behind RoPE)."""
