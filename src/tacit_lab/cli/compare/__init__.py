"""`tacit compare`: train a recipe with several algorithms on one emulated cluster."""
