"""The way of an image, from its row in the ledger to its published result. Begin with coordinator.py."""
