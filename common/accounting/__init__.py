"""What a run costs in bytes: counters, the byte ledger of a parent, and TCP statistics of the kernel."""
