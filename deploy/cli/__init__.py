"""The command `fedstrata`: sub-commands for the roles, for whole labs, and for results."""
