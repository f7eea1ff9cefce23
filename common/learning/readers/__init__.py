"""One file for each kind of data set: what its files are, and how they become arrays.

Files come from elsewhere: sizes are checked before anything is allocated, no pickle runs code, and every way in which
a file may be damaged is an InvalidExperiment that names it.
"""
