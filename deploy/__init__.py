"""The command, the lab on one machine, the broker, and the files of a deployment."""
