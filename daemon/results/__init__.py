"""From a result in the ledger to the files that people read: sidecars, bins, exports."""
