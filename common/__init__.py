"""What all roles share; imports run strictly downward (CONTRIBUTING.md)."""
