"""The README's first screen: run the demo, and put its table and the picture of its page where they stand.

    python benchmarks/flagship.py              # about two minutes on a quiet machine
    python benchmarks/flagship.py --from DIR   # of a run that `tacit compare` has left there

Writes the table and its date into README.md, a picture into docs/images/report.png, and what was recorded
into benchmarks/results/demo.jsonl; needs Chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from paired import RESULTS, ROOT
from tacit.files import put
from tacit_lab.records import Environment

RECORDS = RESULTS / "demo.jsonl"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "report.png"
SIZE = "1200,1500"
DEMO = ("digits", "2x2@100mbit", 0, 4)
"""Recipe, cluster, seed and epochs."""
ALGORITHMS = ("ddp", "bf16", "powersgd", "topk", "lowbit", "auto")


def ran(folder: Path) -> None:
    """Run what `make demo` runs."""
    command = [sys.executable, "-m", "tacit_lab", "compare", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def of_demo(file: Path) -> Environment:
    """Where these records of the demo were made.

    Raises:
        SystemExit: they are of something else.
    """
    from tacit_lab import records

    heads = [each for each in records.read(file) if isinstance(each, records.RunRecord)]
    made = {(each.recipe, each.cluster, each.seed, each.epochs) for each in heads}
    known = [each.algorithm for each in heads if each.algorithm != records.COMPUTE_ONLY]
    if made != {DEMO} or known != [*ALGORITHMS]:
        raise SystemExit(
            f"{file} holds {', '.join(known) or 'nothing'} of {made}, and `make demo` trains "
            f"{', '.join(ALGORITHMS)} of {DEMO}: give a folder that it has made"
        )
    return heads[0].environment


def shown(file: Path) -> str:
    """The table that a run's records make."""
    from rich.console import Console

    from tacit_lab import records, reports

    text = StringIO()
    Console(file=text, width=100).print(reports.table(reports.compare(records.read(file))))
    # The README has no room for what each column means, which stands below the line with the epochs.
    table, epochs, _ = re.split(r"\n(epochs .*)\n", text.getvalue(), maxsplit=1)
    return "\n".join(line.rstrip() for line in f"{table.strip()}\n\n{epochs}".splitlines())


def pictured(folder: Path, path: Path) -> None:
    """The page of a run as a browser shows it.

    Raises:
        SystemExit: there is no Chromium.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    with TemporaryDirectory() as profile:
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
        words += [f"--window-size={SIZE}", f"--screenshot={path}"]
        subprocess.run(
            [browser, *words, (folder / "report.html").absolute().as_uri()], check=True, capture_output=True
        )


def placed(readme: str, table: str, date: str, cores: object) -> str:
    """The README with this table, and with when and on what it was made.

    Raises:
        SystemExit: the place of one of them is not found.
    """
    note = (
        f"(One run on {date}, on {cores} cores: [its records](benchmarks/results/demo.jsonl). Seconds vary.)"
    )
    for pattern, text in (
        (r"```\ndigits on 2x2@100mbit\n.*?\n```", f"```\n{table}\n```"),
        (r"\(One run on .*? Seconds vary\.\)", note),
    ):
        readme, count = re.subn(pattern, text.replace("\\", r"\\"), readme, count=1, flags=re.DOTALL)
        if not count:
            raise SystemExit(f"README.md has no place for the demo's table: nothing matches {pattern!r}")
    return readme


def main() -> None:
    """Run, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="folder", type=Path, help="a folder that `tacit compare` has made")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="tacit-flagship-") as made:
        folder = options.folder or Path(made) / "demo"
        if options.folder is None:
            ran(folder)
        file = folder / "records.jsonl"
        where, table = of_demo(file), shown(file)
        readme = placed(README.read_text(), table, where.date[:10], where.cores)
        pictured(folder, PICTURE)
        shutil.copy(file, RECORDS)
        put(README, readme)
    print(f"wrote {README} and {PICTURE}", file=sys.stderr)


if __name__ == "__main__":
    main()
