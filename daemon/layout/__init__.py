"""The configuration applied to this machine: of first looks, and of second looks."""
