"""From a command line to a finished run: compose the config, check it, claim a folder, take each stage in
order."""
