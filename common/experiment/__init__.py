"""The experiment as one typed tree: a file for each of its tables, and what is checked before a run."""
