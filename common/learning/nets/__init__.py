"""The architectures, by family. Each function makes a module for given inputs, its weights not yet drawn."""
