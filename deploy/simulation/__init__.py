"""Labs in virtual time: the real agents in one process on a simulated network, all randomness from
one seed.
"""
