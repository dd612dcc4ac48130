"""One model, one answer: is there a position bias, of what shape, where from, what helps, and what it costs."""
