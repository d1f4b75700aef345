"""The README's first screen: run the demo, and put its table and the picture of its page where they stand.

    python benchmarks/flagship.py              # about 3 minutes on a quiet machine
    python benchmarks/flagship.py --from DIR   # of a run that `tacit compare` has left there

Writes the table and its date into README.md, what docs/papers/index.md quotes of it, and a picture into
docs/images/report.png; needs Chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from datetime import datetime
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from paired import ROOT, hardware

README = ROOT / "README.md"
INDEX = ROOT / "docs" / "papers" / "index.md"
PICTURE = ROOT / "docs" / "images" / "report.png"
SIZE = "1200,1500"


def ran(folder: Path) -> None:
    """Run what `make demo` runs."""
    command = [sys.executable, "-m", "tacit.cli", "compare", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def shown(folder: Path) -> str:
    """The table that a run's records make."""
    from rich.console import Console

    from tacit import records, reports

    text = StringIO()
    Console(file=text, width=100).print(
        reports.table(reports.compare(records.read(folder / "records.jsonl")))
    )
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
        words += [f"--window-size={SIZE}", "--virtual-time-budget=8000", f"--screenshot={path}"]
        subprocess.run(
            [browser, *words, (folder / "report.html").absolute().as_uri()], check=True, capture_output=True
        )


def placed(readme: str, table: str, date: str, cores: object) -> str:
    """The README with this table, and with when and on what it was made.

    Raises:
        SystemExit: the place of one of them is not found.
    """
    note = (
        f"(One run of `make demo` on {date}, on a virtual machine with {cores} cores; the seconds move by a "
        "tenth from run to run.)"
    )
    for pattern, text in (
        (r"```\ndigits on 2x2@100mbit\n.*?\n```", f"```\n{table}\n```"),
        (r"\(One run of `make demo` on .*?\)", note),
    ):
        readme, count = re.subn(pattern, text.replace("\\", r"\\"), readme, count=1, flags=re.DOTALL)
        if not count:
            raise SystemExit(f"README.md has no place for the demo's table: nothing matches {pattern!r}")
    return readme


def quoted(index: str, table: str) -> str:
    """The table of papers, with the figures that it has from this table (¹)."""
    for name, speedup, less in re.findall(r"^(\S+) .* (\S+x) .* (\S+)% ", table, re.MULTILINE):
        row = rf"(\| `{re.escape(name)}` \|.*\| )\S+x, \S+ % ¹"
        index = re.sub(row, rf"\g<1>{speedup}, {less} % ¹", index)
    return index


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
        when = datetime.fromtimestamp((folder / "records.jsonl").stat().st_mtime)
        table = shown(folder)
        readme = placed(README.read_text(), table, f"{when:%Y-%m-%d}", hardware()["cores"])
        pictured(folder, PICTURE)
        README.write_text(readme)
        INDEX.write_text(quoted(INDEX.read_text(), table))
    print(f"wrote {README}, {INDEX} and {PICTURE}", file=sys.stderr)


if __name__ == "__main__":
    main()
