"""From a command line to a finished run: compose, check, claim a folder, take the stages in order."""
