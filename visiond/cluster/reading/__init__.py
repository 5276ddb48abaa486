"""Reads INPUT: what is listed, and the bytes of its images."""
