"""The two faces of a round, sans-IO: the parent's `Coordinator` and the child's `Participant`.

The same two machines run on both tiers. `now` is monotonic seconds of the node that holds the machine.
"""
