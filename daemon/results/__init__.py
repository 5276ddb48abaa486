"""Writes results from the ledger to what people and programs get: sidecars, bins, moved sources, sinks."""
