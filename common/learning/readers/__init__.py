"""Readers of data sets, one file per format: the files of the format and their conversion to
arrays.

Files are untrusted: sizes are checked before anything is allocated, no pickle runs code, and every
kind of damage raises an InvalidExperiment that names the file.
"""
