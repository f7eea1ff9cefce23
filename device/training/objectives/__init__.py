"""What a device minimises: one file per objective."""
