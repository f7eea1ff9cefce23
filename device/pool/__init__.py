"""The pool in which the devices of one process train: a queue, executors in this process, and
worker processes.
"""
