"""The cloud: global iterations, epoch control, evaluation, checkpoints and results."""
