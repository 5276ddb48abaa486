"""What the commands share: how they read options and configuration, and how they print."""
