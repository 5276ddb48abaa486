"""Models on this machine: which there are, and how others come here, from the model hub or from another machine."""
