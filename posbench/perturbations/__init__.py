"""Changes to a model's forward that studies make inside a block."""
