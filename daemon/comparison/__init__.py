"""A look before a redo: what another model would answer, held against what is stored."""
