"""What a role's process uses of its machine, and the machine itself: read when Prometheus asks."""
