"""A whole lab on this machine: as processes, in network namespaces, or in one process without a network."""
