"""Aggregation in two steps: a rule plans a small mixing matrix from statistics, and one kernel
applies it.

Suffixes of arrays: K models (rows), D trainable columns, F = D + Db float32 columns, Q counters.
"""
