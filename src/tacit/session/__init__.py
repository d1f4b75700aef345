"""A strategy at work: its buckets and their states, its rounds, its lane, its metrics."""

from tacit.session.pending_rounds import PendingRound
from tacit.session.round_costs import RoundRecord, in_turn, joined
from tacit.session.session import Session
from tacit.session.session_context import Training

__all__ = ["PendingRound", "RoundRecord", "Session", "Training", "in_turn", "joined"]
