"""Predictions of a run's costs: seconds, bytes and memory."""
