"""Makes ledger and results agree again: verify, repair, rebuild, redo."""
