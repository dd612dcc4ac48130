"""What methods cost, and how exact they are."""
