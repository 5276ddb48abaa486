"""What answers HTTP: metrics, health, status, and the control socket."""
