"""Audits: what a model, an upload or a recombined model reveals of the samples behind it."""
