"""The device: local training, and its turn on an accelerator."""
