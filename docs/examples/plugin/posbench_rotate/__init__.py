"""A plug-in of posbench: one method."""
