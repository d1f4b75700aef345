"""A strategy at work: its buckets and their states, its rounds, its lane, its metrics."""

from tacit.session.pending_rounds import PendingRound
from tacit.session.session import Session
from tacit.session.session_context import Training
from tacit.session.stats import RoundRecord, in_turn, joined

__all__ = ["PendingRound", "RoundRecord", "Session", "Training", "in_turn", "joined"]
