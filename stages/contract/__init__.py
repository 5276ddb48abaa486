"""What a stage is, for this package, the daemon and plug-ins."""
