"""The folders that runs leave: their files, read into records, compared, drawn."""
