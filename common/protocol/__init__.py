"""The whole protocol, without I/O: messages, the four cores, and their composition as sessions.

Nothing here reads a clock, opens a socket or starts a task: time and what arrives are arguments.
"""
