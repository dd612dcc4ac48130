"""Behind RoPE."""
