"""Gradients that are sent layer by layer, in messages that are not DDP's buckets."""
