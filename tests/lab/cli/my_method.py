"""A module with an algorithm of one's own, as --import takes it."""

import tacit
from tacit.algorithms import algorithm
from tacit.compressors import ErrorFeedback, TopK


@algorithm(family="sparsification", paper="none", compresses=True, changes="a share, by a name of our own")
def mine(*, share: float = 0.1) -> tacit.Strategy:
    """The largest entries.

    Args:
        share: of the entries.
    """
    return tacit.Strategy(compressor=ErrorFeedback(TopK(ratio=share)))
