"""In which order, and with whom: what messages, links and neighbours decide, each side by side with DDP.

    python benchmarks/order.py                  # about 20 minutes
    python benchmarks/order.py --quick          # about 8 minutes: fewer blocks, and a model less
    python benchmarks/order.py --only scheduled # a part, or some of them with commas
    python benchmarks/order.py --table benchmarks/results/DATE-order.json

* `scheduled` (scheduled_steps.py): fusion, priority and DeAR.
* `gossip` (gossip_steps.py): steps on 4, 8 and 16 nodes.
* `slices` (sliced_bytes.py): what leaves a node whose ranks share a gradient out.
* `uneven` (uneven_links.py): one node of four has a tenth of the rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import gossip_steps
import scheduled_steps
import sliced_bytes
import uneven_links
from paired import add_table, conclude, hardware

PARTS: dict[str, ModuleType] = {
    "scheduled": scheduled_steps,
    "gossip": gossip_steps,
    "slices": sliced_bytes,
    "uneven": uneven_links,
}
"""Each has `rank_main`, `rows`, `verdicts` and `table`."""


def table(found: Mapping[str, Any]) -> str:
    """A saved result as Markdown."""
    return "\n\n".join(PARTS[name].table(rows) for name, rows in found["rows"].items())


def judged(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """What was promised, and whether it was met."""
    words = {True: "met", False: "MISSED", None: ""}
    return "\n".join(f"{each['what']}: {each['is']:+.3f} {words[each['met']]}".rstrip() for each in verdicts)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"there is no part {name!r}: write some of {', '.join(PARTS)}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and with --save keep the result under benchmarks/results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks, and a model less")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {', '.join(PARTS)}, with commas")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/DATE-order.json")
    add_table(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table is not None:
        print(table(options.table))
        return
    try:
        names = _parts(options.only) if options.only else [*PARTS]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if options.rank:
        PARTS[names[0]].rank_main(options.rank, options.quick)
        return
    about = hardware()
    rows = {name: PARTS[name].rows(options.quick, __file__) for name in names}
    verdicts = [each for name in names for each in PARTS[name].verdicts(rows[name])]
    result = {
        "benchmark": "order",
        "quick": options.quick,
        "hardware": about,
        "rows": rows,
        "verdicts": verdicts,
    }
    conclude(result, f"{table(result)}\n\n{judged(verdicts)}", options)


if __name__ == "__main__":
    main()
