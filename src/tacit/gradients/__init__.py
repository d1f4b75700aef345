"""Gradients on their way through DDP's hook: averaged at once, a step late, or layer by layer."""
