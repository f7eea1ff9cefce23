"""The bytes of a model as they travel."""
