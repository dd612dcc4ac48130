"""From frames to figures."""
