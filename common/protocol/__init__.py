"""The protocol without I/O: messages, the four state machines, and their composition as sessions.

Nothing here reads a clock, opens a socket or starts a task: the time and received messages are
arguments.
"""
