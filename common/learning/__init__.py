"""Models, data sets, partitions and evaluation: the part of common that imports torch."""
