"""A strategy at work: its lots and their states, its rounds, its lane, its numbers."""

from tacit.session.session import Flight, Session
from tacit.session.tally import RoundRecord, joined

__all__ = ["Flight", "RoundRecord", "Session", "joined"]
