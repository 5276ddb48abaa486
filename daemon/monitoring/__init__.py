"""Metrics, and the snapshot of the daemon that `status` shows."""
