"""What outlives a process: models in files, and the state of aggregation rules."""
