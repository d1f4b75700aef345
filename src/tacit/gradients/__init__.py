"""Gradients, exchanged through DDP's communication hook: averaged at once, a step late, or layer by layer."""
