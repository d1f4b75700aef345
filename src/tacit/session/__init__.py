"""A strategy at work: its lots and their states, its rounds, its lane, its numbers."""

from tacit.session.describing import one_line
from tacit.session.session import Flight, Session
from tacit.session.tally import RoundRecord, joined
from tacit.session.times import timeline

__all__ = ["Flight", "RoundRecord", "Session", "joined", "one_line", "timeline"]
