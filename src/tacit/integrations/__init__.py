"""Doors to the frameworks in which people train: a module each, which imports its framework.

`tacit.integrations.lightning`, `tacit.integrations.transformers` and `tacit.integrations.accelerate`. With
Fabric, `tacit.attach` is all that is needed, and `AllRanks` for its checkpoints.
"""

from tacit.integrations.checkpoints import AllRanks

__all__ = ["AllRanks"]
