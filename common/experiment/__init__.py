"""The experiment as typed data, one file per concept, and the checks before a run."""
