"""One run as a search, a study or a stage sees it: model, task, method, folder, and a resumable loop."""
