"""Images from disk: read, checked, decoded once into a cache, and made ready for training."""
