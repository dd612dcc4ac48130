"""Theory without a trained model: masks (Wu et al. 2025), and what structure alone predicts."""
