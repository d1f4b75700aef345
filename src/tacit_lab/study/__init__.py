"""What algorithms cost in accuracy, by length of training: gaps to plain training, each at its best rate."""
