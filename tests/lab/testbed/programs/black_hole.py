"""Measures the links of nodes that lose packets above a size, without a word; says how that ended."""

from __future__ import annotations

import json
import struct
import sys
from datetime import timedelta

from tacit.errors import ProbeError
from tacit.transports.probing import measure
from tacit.transports.process_groups import joined_world
from tacit_lab.testbed.network import nftables as nft

LARGEST = struct.pack("!H", int(sys.argv[1]))
LENGTH_OF_PACKET = nft.number(1, 1) + nft.number(2, 1) + nft.number(3, 2) + nft.number(4, 2)
GREATER = nft.number(1, 1) + nft.number(2, 4) + nft.nested(3, nft.attribute(1, LARGEST))
DROP = nft.number(1, 0) + nft.nested(2, nft.nested(2, nft.number(1, 0)))
EXPRESSIONS = [(b"payload", LENGTH_OF_PACKET), (b"cmp", GREATER), (b"immediate", DROP)]

nft.change(
    [
        nft.of_tables(nft.NEW_TABLE, nft.text(1, nft.TABLE)),
        nft.chain(b"hole", nft.INPUT),
        nft.rule(b"hole", nft.IN_NAME, EXPRESSIONS),
    ]
)
with joined_world(timedelta(seconds=60)) as (rank, group):
    said = ""
    try:
        measure(group, [[0], [1]], seconds=0.01, timeout=timedelta(seconds=4))
    except ProbeError as error:
        said = str(error)
    print(json.dumps({"rank": rank, "said": said}), flush=True)
