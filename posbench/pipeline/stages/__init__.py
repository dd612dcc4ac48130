"""The stages of a run, in order: search, study, intervene, evaluate, report."""
