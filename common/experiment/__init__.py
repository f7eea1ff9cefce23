"""The experiment as typed data, one file per table, and the checks before a run."""
