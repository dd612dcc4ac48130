"""Jobs of other processes and machines."""
