"""Sweeps: grids of experiments over seeds, run by one command, with a table beside a paper's
figures.
"""
