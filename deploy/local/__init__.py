"""A whole lab on this machine: as processes, in network namespaces, or without a network in one process."""
