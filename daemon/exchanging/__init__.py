"""Exchanges the models of stations while the daemon works."""
