"""The charts of a page."""
