"""`tacit run`: run a training script, unchanged, on an emulated cluster."""
