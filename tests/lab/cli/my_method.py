"""A module with an algorithm of one's own, as --import takes it."""

import tacit
from tacit.algorithms import algorithm
from tacit.compressors import ErrorFeedback, TopK


@algorithm(family="sparsification", paper="none", compresses=True, changes="a share, by a name of our own")
def mine(*, share: float = 1 / 3, least: int = 1) -> tacit.Strategy:
    """The largest entries.

    Args:
        share: of the entries,
            above 0 to 1.
        least (int): not used.

    Raises:
        ConfigError: the share cannot be.
    """
    return tacit.Strategy(compressor=ErrorFeedback(TopK(ratio=share)))
