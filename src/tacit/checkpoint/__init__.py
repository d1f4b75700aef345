"""The state of a session in a checkpoint: what it holds, how it is checked, and how it is shared out."""
