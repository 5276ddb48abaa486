"""The page for people: what each of its addresses shows."""
