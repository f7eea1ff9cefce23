"""Pulling blobs. The owner announces a manifest, receivers ask for the chunks they lack, a window at a time.

Sans-IO: no network and no clock of their own; `now` is monotonic seconds.
"""
