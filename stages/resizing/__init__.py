"""Resizing on the device, to the pixel as Pillow does it."""
