"""Says what leaves the node in a second, in all and without the background load."""

from __future__ import annotations

import json
import os
import time

from tacit_lab.testbed.network import counters

INTERFACE = os.environ["TACIT_INTERFACE"]


def in_all() -> int:
    return counters._counter(INTERFACE, counters._TRANSMITTED)


time.sleep(0.3)  # what a link lets through at once
start, all_, ours = time.monotonic(), in_all(), counters.transmitted(INTERFACE)
time.sleep(1)
sent, left = in_all() - all_, counters.transmitted(INTERFACE) - ours
rate = 8 * sent / (time.monotonic() - start)
print(json.dumps({"node": int(os.environ["TACIT_NODE"]), "rate": rate, "ours": left}), flush=True)
