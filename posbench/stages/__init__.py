"""The stages of a run: search, intervene, evaluate, report. They wire models, methods, tasks and the record."""
