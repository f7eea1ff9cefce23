"""Resources of a role's process and of its machine, read when Prometheus scrapes."""
