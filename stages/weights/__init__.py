"""Packs of weights: found, recognised, verified, pulled and made."""
