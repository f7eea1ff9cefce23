"""An agent's processes: the channel to each, the server that forks them, the rows that they
share.
"""
