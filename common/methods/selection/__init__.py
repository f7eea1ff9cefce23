"""Which children take part in a round: one file per selector."""
