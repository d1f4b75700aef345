"""WITH WHOM, by which collective."""

from tacit.topologies.flat import Flat

__all__ = ["Flat"]
