"""Baselines that import the public names alone, as a user's file does: `from fedstrata import
...`.
"""
