"""Laws for compressors, topologies, rounds and merges that you have written.

Each check runs ranks inside this process, without a network. It raises an `AssertionError` that names the
law, and where it does not hold: the topology, the type, the number of ranks. Call them from a test::

    from tacit.testing import check_compressor

    def test_my_codec() -> None:
        check_compressor(MyCodec())
"""

from tacit.testing.exchanges import Checked, check_compressor, check_topology
from tacit.testing.merges import check_merge
from tacit.testing.schedules import check_rounds

__all__ = ["Checked", "check_compressor", "check_merge", "check_rounds", "check_topology"]
