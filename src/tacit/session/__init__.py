"""A strategy at work: its lots and their states, its rounds, its lane, its numbers."""

from tacit.session.session import Flight, Session
from tacit.session.tally import RoundRecord, joined
from tacit.session.times import timeline

__all__ = ["Flight", "RoundRecord", "Session", "joined", "timeline"]
