"""Attaching a strategy to a model: what is checked, agreed on, put together, watched and taken away."""
