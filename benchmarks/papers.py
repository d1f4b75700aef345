"""The papers' claims, held to what is trained and timed here.

    python benchmarks/papers.py daso              # a few minutes: times what today's code has not timed yet
    python benchmarks/papers.py all --data PATH   # all six, under half an hour on 2 quiet cores
    python benchmarks/papers.py --table           # what was trained and timed until now; measures nothing
    python benchmarks/papers.py --publish         # the same, in docs/papers
    python benchmarks/papers.py mp2 --quick       # two minutes: steps of `digits`, nothing goes to results
    python benchmarks/papers.py daso --quick --links 100mbit,30ms

Nothing is trained here: accuracies are those of benchmarks/accuracy.py, each algorithm at its best learning
rate, and of the longest training that there is. Times and bytes come from windows on links of 100 Mbit/s
(windows.py), each of which is a line of benchmarks/results/papers-windows.jsonl with its date, commit and
hardware. Windows of other sources are measured again; until then the tables show them, with their date.
Images are those of CIFAR-10, from --data or where they are found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import windows
from accuracy_page import enough
from comparing import images
from experiments import LINKS, PAPERS, Paper, Scale
from fingerprints import noted, standing
from kept import fingerprint
from launched import refuse_early
from paired import RESULTS, ROOT, RUNS
from paper_page import claims, figures, pages, placed
from runs import lines
from tacit.files import put
from tacit_lab.records import CHOOSING
from tacit_lab.study.jobs import read
from windows import Found

FILE = "papers-windows.jsonl"
DOCS = ROOT / "docs" / "papers"
SOURCES = ("arms.py", "paired.py", "windows.py")
"""What makes windows, beside src."""
CLUSTER = "2x2@100mbit"
"""One that must be possible for anything here."""
PRECISION = "fp32"
"""What networks for images compute in: bf16 is slower on many CPUs."""


def trained(papers: Sequence[Paper]) -> list[dict[str, Any]]:
    """The rows of accuracy.py for what these papers need, each with whether it still `stands`."""
    done, kept = read(RESULTS / accuracy.FILE), noted()
    arms = {arm for each in papers for arm in each.arms}
    wanted = [each for each in accuracy.STUDY.there(done) if each[1] in arms]
    rows = enough(accuracy.STUDY.rows(done, wanted, range(CHOOSING)))
    stands = {arm: standing(arm, kept) for arm in {row["arm"] for row in rows}}
    return [{**row, "stands": stands[row["arm"]]} for row in rows]


def timed(path: Path) -> list[Found]:
    """The windows that a file holds, the newest last."""
    return [each for each in lines(path, Found.from_json) if each.error is None]


def main() -> None:
    """Measure what is missing, and print the tables or write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", nargs="?", default="all", choices=[*PAPERS, "all"])
    parser.add_argument("--data", help="CIFAR-10, as `tacit compare cifar10 --data` takes it")
    parser.add_argument("--quick", action="store_true", help="steps of digits, kept in tacit-out")
    parser.add_argument("--links", default=LINKS, help="of --quick, e.g. 100mbit,30ms,0.1%%loss")
    parser.add_argument("--table", action="store_true", help="measure nothing, and print what there is")
    parser.add_argument("--publish", action="store_true", help="measure nothing, and write the pages of docs")
    options = parser.parse_args()
    if options.links != LINKS and not options.quick:
        parser.error("--links is of --quick: write both, or leave it out")
    if options.quick and (options.data or options.table or options.publish):
        parser.error("--quick times digits and publishes nothing: leave --data, --table and --publish out")
    if options.publish and options.paper != "all":
        parser.error(f"--publish writes the pages of all papers: leave {options.paper} out")
    papers = [*PAPERS.values()] if options.paper == "all" else [PAPERS[options.paper]]
    if options.table or options.publish:
        found = timed(RESULTS / FILE)
    else:
        refuse_early(CLUSTER)
        if options.quick:
            papers, scale = [each.quick() for each in papers], Scale(blocks=2, links=options.links)
        else:
            scale = Scale(data=str(images(options.data)), precision=PRECISION)
        wanted = [window for each in papers for window in each.windows(scale)]
        path = (RUNS if options.quick else RESULTS) / FILE
        found = windows.carry_out(wanted, path, state=fingerprint(*SOURCES))
    rows = trained(papers)
    if options.publish:
        for name, text in pages(rows, found).items():
            put(DOCS / name, placed((DOCS / name).read_text(), text, name))
            print(f"wrote {DOCS / name}", file=sys.stderr)
        return
    print("\n\n".join([claims(papers, rows, found), *(figures(each, rows, found) for each in papers)]))
    failed = sum(each.error is not None for each in found)
    if failed:
        raise SystemExit(f"{failed} windows failed, for the reasons above; the same command tries them again")


if __name__ == "__main__":
    main()
