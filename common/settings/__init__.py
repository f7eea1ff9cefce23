"""The tables of an experiment, each one by itself: data, training, links, hardware, privacy, own
code.
"""
