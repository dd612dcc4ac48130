"""Files of runs: where they come from, atomic writes, hashes, Markdown tables, and the machine."""
