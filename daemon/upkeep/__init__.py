"""Keeps a ledger in good order over the years, while the daemon works: checks, backups, pruning."""
