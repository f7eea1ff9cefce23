"""Attacks: one file each, behind the seam of a user's own (`common/methods/attack.py`)."""
