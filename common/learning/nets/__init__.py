"""The architectures, by family. Each function creates a module for given inputs with uninitialised weights."""
