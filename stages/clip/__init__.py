"""CLIP: embeddings, tags, and the text encoder that compares captions with images."""
