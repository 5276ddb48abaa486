"""From a drop folder to an image in the ledger, and from there into memory."""
