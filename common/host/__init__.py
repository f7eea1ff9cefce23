"""This machine: its resources, files, threads and child processes."""
