"""Errors of a session: failed exchanges, and numbers that are not finite."""
