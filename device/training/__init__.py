"""Training a model on one device: local data, batches, augmentation and SGD."""
