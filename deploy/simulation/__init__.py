"""A lab in virtual time: the real agents in one process on a simulated network, everything drawn from one seed."""
