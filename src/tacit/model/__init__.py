"""The user's model, as a session sees it."""
