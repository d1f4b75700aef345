"""Attaching a strategy to a model: checks of arguments, comparison of ranks, levels and hooks."""
