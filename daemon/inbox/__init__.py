"""Finds files in drop folders, admits them to the ledger, and reads them into memory."""
