"""The device agent: local training, and its use of accelerators."""
