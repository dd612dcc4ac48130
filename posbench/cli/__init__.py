"""The command line: bare ``key=value`` arguments run; a few verbs inspect files and runs."""
