"""Links that the kernel enforces: shaping by `tc`, an interface of this host, and measuring between
two hosts.
"""
