"""The institution: a child of the cloud and the parent of its devices."""
