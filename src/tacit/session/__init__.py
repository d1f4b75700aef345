"""A strategy at work: its lots and their states, its rounds, its lane, its numbers."""

from tacit.session.session import Session
from tacit.session.tally import RoundRecord, joined

__all__ = ["RoundRecord", "Session", "joined"]
