"""Checks of the other scripts, on models on the CPU that are exchanged as those on a GPU are.

Each kind of thing once. What is known to be different there is left out:

* `the_bytes_are_those_of_the_formula`, `not_told_four_ranks_send_bytes_in_two_phases`: ranks tell each other of
  an overflow too, by a few more numbers;
* `a_nan_is_told_with_where_it_began_and_not_where_it_came_to`: on a device parameters are not looked up at once;
* what `GlobalTopK` does: it stays on the host.
"""

import json
import os
import sys
import time
import beside_checks, checks, daso_checks, late_checks, loop_checks, progress_checks
from replicas import Checks
import tacit

ALL = Checks()
for module in (checks, loop_checks, late_checks, progress_checks, beside_checks, daso_checks):
    for name, f in module.CHECKS.items():

        def timed(f=f, name=name):
            t = time.process_time(), time.monotonic()
            try:
                f()
            finally:
                print(
                    json.dumps(
                        {"t": name, "cpu": time.process_time() - t[0], "wall": time.monotonic() - t[1]}
                    ),
                    flush=True,
                )

        ALL[f"{module.__name__}.{name}"] = timed
if __name__ == "__main__":
    ALL.run(sys.argv[2:])
