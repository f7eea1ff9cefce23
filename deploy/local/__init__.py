"""A whole lab on this machine: as processes, or without a network in one process."""
