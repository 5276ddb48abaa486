"""Writes results from the ledger to the files that people read: sidecars, bins, exports, sinks."""
