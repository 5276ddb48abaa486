"""The composition root: what a daemon is made of, and its life."""
