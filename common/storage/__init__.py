"""Persistent data: models in files, and the state of aggregation rules."""
