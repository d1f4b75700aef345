"""The state of a session in a checkpoint: its contents, its checks, and its division among ranks."""
