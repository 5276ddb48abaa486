"""What every part of the daemon speaks of: jobs, messages, errors, sidecars, object stores."""
