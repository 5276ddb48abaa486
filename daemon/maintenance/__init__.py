"""What keeps a ledger and its results well: upkeep, and the commands that check, repair and redo."""
