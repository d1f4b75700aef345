"""Replicas that step alone between rounds: what they exchange in a round, and how its answer is applied."""
