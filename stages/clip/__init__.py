"""CLIP: embeddings, tags, and the text tower that compares captions with images."""
