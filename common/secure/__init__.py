"""Secure sums: a parent learns the sum of its children's uploads, and nothing else of them."""
