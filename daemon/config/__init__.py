"""daemon.toml: what may stand in it, how it is read, and its reference."""
