"""The recipe that trains the embedded models, and the models."""
