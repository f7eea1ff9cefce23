"""A lab's description, and what each of its machines needs to run its nodes as services."""
