"""Synthetic scenes with their truth: for `visiond samples`, `demo` and `bench`, and to train and score the mini pack."""
