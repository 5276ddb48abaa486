"""What brings ledger and results together again: verify, repair, rebuild, redo."""
