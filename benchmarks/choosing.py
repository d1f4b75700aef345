"""What to pick for a model, a cluster and its links: the decision table of docs/overhead.md.

    python benchmarks/choosing.py --data PATH    # about 30 minutes; goes on where it was interrupted
    python benchmarks/choosing.py --quick        # a few minutes: the small model on 100 Mbit/s
    python benchmarks/choosing.py --quick --links 100mbit,30ms,0.1%loss
    python benchmarks/choosing.py --table        # print the table of what was measured, and no more
    python benchmarks/choosing.py --map          # a minute: the map and the table of docs/how-to-choose.md

Each setting is one launch in which all algorithms run interleaved (windows.py), with DDP and with ranks that
never talk. Of algorithms that cost training something else, the fastest of its kind stands in the table. The
large model needs the images of CIFAR-10; without them its rows are left out. What was measured is a line of
benchmarks/results/choosing-windows-2.jsonl, and the table is put where docs/overhead.md has its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import choosing_map
from comparing import ARCHIVES, images_or
from experiments import BIG, LINKS, NETWORKS, PRECISIONS, Network, Scale, settled, words
from markdown_tables import markdown
from paired import RESULTS, ROOT
from paper_page import every, withheld
from runs import COMPUTE_ONLY, Run
from tacit.files import put
from windows import Found, Window, carry_out, held, plan

FILE = RESULTS / "choosing-windows-2.jsonl"
"""The one without a number holds windows of what topk and dgc stood for before."""
PAGE = ROOT / "docs" / "overhead.md"
BEGIN, END = "<!-- made by benchmarks/choosing.py -->\n", "<!-- until here -->"
BLOCKS, QUICK_BLOCKS = 3, 2
NODES, FLAT = "2x2", "4x1"
HALVED = ("bf16",)
COMPRESSED = ("topk:ratio=0.01", "powersgd:rank=4", "qsgd")
SELDOM = ("localsgd:sync_every=8", "diloco:sync_every=32")
BY_NODE = ("ednncomm:sync_every=16",)
SMALL = NETWORKS["digits"]
IMAGES = ARCHIVES[0]
"""What windows say of where the images are."""
HEAD = ("model", "cluster", "DDP", "waits", "half the bits", "fewer bits", "fewer rounds", "limit")


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, whose links have a rate."""

    network: Network
    parameters: str
    nodes: str
    rate: str
    precision: str = PRECISIONS[0]

    @property
    def cluster(self) -> str:
        """As text."""
        return f"{self.nodes}@{self.rate}"

    @property
    def seldom(self) -> tuple[str, ...]:
        """Those of fewer rounds that make sense there."""
        return (*SELDOM, *BY_NODE) if self.nodes == NODES else SELDOM

    def window(self, data: str | None, blocks: int) -> Window:
        """What is measured."""
        scale = Scale(data=data, precision=self.precision)
        run = Run(words(self.network, scale), self.cluster, epochs=self.network.epochs)
        (window,) = plan(run, ("ddp", *HALVED, *COMPRESSED, *self.seldom), blocks)
        return window


def settings(scale: Scale) -> Iterator[Setting]:
    """Those that are measured, the fastest links first."""
    quick = scale.quick
    for nodes in (NODES,) if quick else (NODES, FLAT):
        for rate in (scale.links,) if quick else ("1gbit", "100mbit", "10mbit"):
            yield Setting(SMALL, "1 million", nodes, rate)
    for nodes in (NODES, FLAT):
        for rate in ("1gbit", "100mbit"):
            if scale.data and not quick:
                yield Setting(BIG, f"9 million, {scale.precision}", nodes, rate, scale.precision)


def table(found: Sequence[tuple[Setting, Found]]) -> str:
    """Markdown: a row a setting, and when and at which commits they were measured."""
    whose = " and ".join(sorted({each.of for _, each in found}))
    dates, commits, cpus = (every(fact, [each for _, each in found]) for fact in ("date", "commit", "cpu"))
    return (
        markdown(HEAD, [_row(setting, each) for setting, each in found])
        + f"\n\nMeasured on {dates}, at {commits}; {cpus}. Seconds are those of {whose}."
        + f"{withheld([each for _, each in found])}\n"
    )


def asked(scale: Scale) -> dict[Setting, Window]:
    """The windows of all settings."""
    return {each: each.window(scale.data, scale.blocks) for each in settings(scale)}


def found_of(path: Path, scale: Scale) -> list[tuple[Setting, Found]]:
    """What the file holds of the settings, in the precision of which it holds most."""
    there = held(path)
    both = [asked(replace(scale, precision=precision)) for precision in PRECISIONS]
    return max(
        ([(each, there[w.key]) for each, w in some.items() if w.key in there] for some in both), key=len
    )


def _row(setting: Setting, found: Found) -> tuple[str, ...]:
    ddp, alone = found.seconds("ddp"), found.seconds(COMPUTE_ONLY)

    def best(of: Sequence[str]) -> str:
        name = min(of, key=found.seconds)
        return f"`{name}` {_speedup(ddp / found.seconds(name))}"

    return (
        setting.parameters,
        setting.cluster,
        f"{1e3 * ddp:.0f} ms",
        f"{max(0.0, 1 - alone / ddp):.0%}",
        best(HALVED),
        best(COMPRESSED),
        best(setting.seldom),
        _speedup(ddp / alone),
    )


def _speedup(times: float) -> str:
    return f"{times:.0f}x" if times >= 10 else f"{times:.1f}x"


def placed(page: str, text: str) -> str:
    """The page with this table where its place is.

    Raises:
        SystemExit: there is no such place.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} has no place for the table: write {BEGIN.strip()} and {END} around it")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="CIFAR-10, as `tacit compare cifar10 --data` takes it")
    parser.add_argument("--quick", action="store_true", help="one setting, and nothing is written")
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    parser.add_argument("--map", action="store_true", help="measure nothing; see choosing_map.py")
    parser.add_argument("--links", default=LINKS, help="of --quick, e.g. 100mbit,30ms,0.1%%loss")
    options = parser.parse_args()
    if options.links != LINKS and not options.quick:
        parser.error("--links is of --quick: write both, or leave it out")
    if options.map and (options.quick or options.table):
        parser.error("--map measures nothing, and writes pages: leave --quick and --table out")
    if options.map:
        print("wrote", *choosing_map.write(options.data), sep="\n", file=sys.stderr)
        return
    found = None if options.quick else images_or("rows of the large model are left out", options.data)
    blocks = QUICK_BLOCKS if options.quick else BLOCKS
    scale = Scale(blocks=blocks, data=str(found) if found else None, quick=options.quick, links=options.links)
    path = ROOT / "tacit-out" / FILE.name if options.quick else FILE
    path.parent.mkdir(exist_ok=True)
    scale = settled(scale, lambda some: asked(some).values(), held(path))
    wanted = list(asked(scale).values())
    failed = [] if options.table else [each for each in carry_out(wanted, path) if each.error is not None]
    text = table(found_of(path, replace(scale, data=IMAGES)))
    print(text)
    if failed:
        raise SystemExit(f"{len(failed)} windows failed, so that the page is left as it was; try again")
    if not (options.quick or options.table):
        put(PAGE, placed(PAGE.read_text(), text))
        print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
