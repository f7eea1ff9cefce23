"""Shared by all commands: options, log lines, tables, progress, and the exit code after an
error.
"""
