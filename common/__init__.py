"""Code shared by all roles; imports run strictly downward (CONTRIBUTING.md)."""
