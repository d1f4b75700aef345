"""Hooks on the user's optimizers: steps are counted, and momentum or variance is taken over."""
