"""Triton kernels for convolutions, and what decides whether they can be used."""
