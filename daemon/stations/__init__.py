"""Stations: each takes jobs from files on disk to published results, on its own workers."""
