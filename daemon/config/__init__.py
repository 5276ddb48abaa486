"""daemon.toml: its keys, how it is read, and its reference."""
