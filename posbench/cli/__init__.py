"""The command line: bare ``key=value`` arguments run; a few verbs look at what is there."""
