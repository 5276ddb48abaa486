"""What can be seen of a running daemon: its metrics, and the snapshot that `status` shows."""
