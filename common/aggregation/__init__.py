"""Plan, then apply: an algorithm decides a small mixing matrix from statistics, one kernel applies it.

Legend of the shape suffixes: K models (rows), D trainable columns, F = D + Db float32 columns, Q counters.
"""
