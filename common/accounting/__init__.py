"""Byte counts of a run: counters, the byte ledger of a parent, and the kernel's TCP statistics."""
