"""Code that goes out with a checkpoint: each file is copied whole, for the architecture at hand."""
