"""A model as bytes: its flat layout, and the codecs that make it smaller on the wire."""
