"""Stores that keep parameters for others: parameter servers, and ranks that average in pairs."""
