"""The cloud: global rounds, epoch control, evaluation, checkpoints and results."""
