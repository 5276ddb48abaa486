"""Synthetic scenes with their truth: what the mini pack is trained and scored on, and what `visiond bench` reads."""
