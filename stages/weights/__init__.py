"""Packs of weights: finding, recognizing, verifying, pulling and making them."""
