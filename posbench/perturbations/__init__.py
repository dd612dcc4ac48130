"""Changes of spans of tokens, for studies."""
