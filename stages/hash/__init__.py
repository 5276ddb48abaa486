"""The stage hash: a perceptual hash, by which copies of a picture are found without a model."""
