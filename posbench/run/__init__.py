"""One run: its folder, its rows, what a stage receives."""
