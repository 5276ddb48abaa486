"""Which stages run on which devices."""
