"""Vmapped training: the models of several devices in batched steps."""
