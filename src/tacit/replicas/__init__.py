"""Replicas that take steps of their own: what they exchange in a round, and what a round does to them."""
