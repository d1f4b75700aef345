"""Hooks on the user's optimizers: they count steps, and take over momentum or variance."""
