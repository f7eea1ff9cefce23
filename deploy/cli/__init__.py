"""The command `fedstrata`: one sub-command for each role and each question."""
