"""What keeps a ledger in order over the years, beside the work."""
