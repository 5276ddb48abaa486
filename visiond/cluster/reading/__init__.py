"""Reads INPUT: what is listed, the bytes of its images, and what a list says about them."""
