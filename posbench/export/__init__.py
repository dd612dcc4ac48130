"""From a method with its constants to files that a serving engine loads; one module a format."""
