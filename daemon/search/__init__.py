"""Finds images by words, by meaning and by what they are like. All of it is made from the ledger, and may be deleted."""
