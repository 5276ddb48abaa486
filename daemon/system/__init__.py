"""What the machine and the operating system have: signals, clocks, mounts, GPUs, systemd, and where the log goes."""
