"""The models: what each stage is, its weights, and the bin that follows from the answers. Knows nothing of the daemon."""
