"""One language model: load it, encode, read, change and restore it."""
