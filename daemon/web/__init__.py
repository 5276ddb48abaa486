"""HTTP: metrics, health, status, and the control socket."""
