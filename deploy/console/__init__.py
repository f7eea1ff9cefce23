"""What all commands share: options, log lines, tables, progress, and how an error ends a command."""
