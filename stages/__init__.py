"""The models: the stages, their weights, and the bin that follows from their answers.
Imports nothing of the daemon."""
