"""Says to which other nodes this one can open a connection."""

from __future__ import annotations

import json
import os
import socket
import time

from tacit_lab.testbed.network.nodes import address

NODE, NODES, PORT, SECONDS = int(os.environ["TACIT_NODE"]), int(os.environ["TACIT_NODES"]), 7000, 1.0


def reaches(node: int) -> bool:
    """Whether it answers; it may still be starting."""
    end = time.monotonic() + 5 * SECONDS
    while time.monotonic() < end:
        try:
            socket.create_connection((address(node), PORT), timeout=SECONDS).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
        except TimeoutError:
            return False
        else:
            return True
    return False


with socket.create_server((address(NODE), PORT)):
    found = [node for node in range(NODES) if node != NODE and reaches(node)]
    print(json.dumps({"node": NODE, "reaches": found}), flush=True)
    time.sleep(6 * SECONDS)  # others may not have asked yet
