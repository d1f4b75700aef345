"""What to pick for a model, a cluster and its links: the decision table of docs/how-to-choose.md.

    python benchmarks/choosing.py --data PATH    # about 30 minutes; goes on where it was interrupted
    python benchmarks/choosing.py --quick        # a few minutes: the small model on 100 Mbit/s
    python benchmarks/choosing.py --table        # print the table of what was measured, and no more

Each setting is one launch in which all algorithms run interleaved (windows.py), with DDP and with ranks that
never talk. Of algorithms that cost training something else, the fastest of its kind stands in the table. The
large model needs the images of CIFAR-10; without them its rows are left out. What was measured is a line of
benchmarks/results/choosing-windows.jsonl, and the table is put where docs/how-to-choose.md has its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparing import images_or
from experiments import BIG, NETWORKS, Network, Scale, words
from markdown_tables import markdown
from paired import RESULTS, ROOT
from runs import COMPUTE_ONLY, Run
from windows import Found, Window, carry_out, plan, read

FILE = RESULTS / "choosing-windows.jsonl"
PAGE = ROOT / "docs" / "how-to-choose.md"
BEGIN, END = "<!-- made by benchmarks/choosing.py -->\n", "<!-- until here -->"
BLOCKS, QUICK_BLOCKS = 3, 2
NODES, FLAT = "2x2", "4x1"
HALVED = ("bf16",)
COMPRESSED = ("topk:ratio=0.01", "powersgd:rank=4", "qsgd")
SELDOM = ("localsgd:sync_every=8", "diloco:sync_every=32")
BY_NODE = ("ednncomm:sync_every=16",)
SMALL = NETWORKS["digits"]
IMAGES = "cifar10-jpeg-q75.tar.xz"
"""What windows say of where the images are."""
HEAD = ("model", "cluster", "DDP", "waits", "half the bits", "fewer bits", "fewer rounds", "limit")


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, whose links have a rate."""

    network: Network
    parameters: str
    nodes: str
    rate: str

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
        run = Run(words(self.network, Scale(data=data)), "", self.cluster, epochs=self.network.epochs)
        (window,) = plan(run, ("ddp", *HALVED, *COMPRESSED, *self.seldom), blocks)
        return window


def settings(data: str | None, *, quick: bool) -> Iterator[Setting]:
    """Those that are measured, the fastest links first."""
    for nodes in (NODES,) if quick else (NODES, FLAT):
        for rate in ("100mbit",) if quick else ("1gbit", "100mbit", "10mbit"):
            yield Setting(SMALL, "1 million", nodes, rate)
    for nodes in (NODES, FLAT):
        for rate in ("1gbit", "100mbit"):
            if data and not quick:
                yield Setting(BIG, "9 million", nodes, rate)


def table(found: Sequence[tuple[Setting, Found]]) -> str:
    """Markdown: a row a setting, and when and at which commits they were measured."""
    about = [[str(each.hardware.get(fact)) for _, each in found] for fact in ("date", "commit", "cpu")]
    dates, commits, cpus = (", ".join(sorted(set(each))) for each in about)
    return (
        markdown(HEAD, [_row(setting, each) for setting, each in found])
        + f"\n\nMeasured on {dates}, at {commits}; {cpus}.\n"
    )


def found_of(path: Path, blocks: int, *, quick: bool) -> list[tuple[Setting, Found]]:
    """What the file holds of the settings, whether the images are here now or not."""
    held = {found.window: found for found in read(path) if found.error is None}
    asked = {each: each.window(IMAGES, blocks).key for each in settings(IMAGES, quick=quick)}
    return [(each, held[window]) for each, window in asked.items() if window in held]


def _row(setting: Setting, found: Found) -> tuple[str, ...]:
    ddp, alone = found.seconds("ddp"), found.seconds(COMPUTE_ONLY)

    def best(of: Sequence[str]) -> str:
        name = min(of, key=found.seconds)
        return f"`{name}` {ddp / found.seconds(name):.1f}x"

    return (
        setting.parameters,
        setting.cluster,
        f"{1e3 * ddp:.0f} ms",
        f"{max(0.0, 1 - alone / ddp):.0%}",
        best(HALVED),
        best(COMPRESSED),
        best(setting.seldom),
        f"{ddp / alone:.1f}x",
    )


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
    options = parser.parse_args()
    found = None if options.quick else images_or("rows of the large model are left out", options.data)
    data = str(found) if found else None
    path = ROOT / "tacit-out" / FILE.name if options.quick else FILE
    path.parent.mkdir(exist_ok=True)
    blocks = QUICK_BLOCKS if options.quick else BLOCKS
    wanted = [each.window(data, blocks) for each in settings(data, quick=options.quick)]
    failed = [] if options.table else [each for each in carry_out(wanted, path) if each.error is not None]
    text = table(found_of(path, blocks, quick=options.quick))
    print(text)
    if failed:
        raise SystemExit(f"{len(failed)} windows failed, so that the page is left as it was; try again")
    if not (options.quick or options.table):
        PAGE.write_text(placed(PAGE.read_text(), text))
        print(f"wrote {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
