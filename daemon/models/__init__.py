"""Models on this machine: which there are, how others come here, whether they work, and what another one would change."""
