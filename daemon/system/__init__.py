"""The machine and the operating system: signals, clocks, mounts, GPUs, systemd, and the log."""
