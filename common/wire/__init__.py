"""What travels: typed records, topics, and the bytes of a model."""
