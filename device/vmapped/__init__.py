"""Training the models of several devices in one batch of vmapped steps."""
