"""What can be derived without a trained model: masks as graphs and RoPE (Wu et al. 2025), the causal mask
alone (Behind RoPE)."""
