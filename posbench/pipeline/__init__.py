"""From a composed config to a finished run."""
