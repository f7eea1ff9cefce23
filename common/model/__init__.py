"""A model as bytes: its flat layout, and the codecs that compress it for transfer."""
