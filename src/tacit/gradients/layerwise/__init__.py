"""Gradients that leave layer by layer, in messages of tacit's own."""
