"""How the mini pack, the small models inside visiond, is made: `visiond train mini`."""
