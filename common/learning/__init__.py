"""Models, data sets, partitions and evaluation; the only package of common that imports torch."""
