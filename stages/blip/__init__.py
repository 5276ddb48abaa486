"""BLIP: captions."""
