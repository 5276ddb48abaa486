"""Triton kernels for convolutions and for resizing, and what decides whether they can be used."""
