"""Studies: measurements that do not score a task."""
