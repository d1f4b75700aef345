"""A real browser that has no network: Chromium, headless."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium"),
]
WORDS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *(
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        "--v=0",
        "--allow-file-access-from-files",
    ),
]
PATIENT = "--virtual-time-budget=1000000"
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


def opened(path: Path, *more: str, wait: str = PATIENT) -> tuple[str, list[str]]:
    """The document after its scripts ran, and the console; without `wait`: at the load event."""
    assert CHROMIUM is not None
    profile = path.parent / "profile"
    shutil.rmtree(profile, ignore_errors=True)
    command = [
        CHROMIUM,
        *WORDS,
        *([wait] if wait else []),
        f"--user-data-dir={profile}",
        *more,
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def titled(path: Path) -> tuple[str, list[str]]:
    """The title that a page of ours gives itself when it has looked at others, and the console.

    On a busy machine the browser's time may be up before they are drawn: then it is asked again.
    """
    for _ in range(3):
        document, console = opened(path)
        found = re.search(r"<title>(.*?)</title>", document)
        if found is not None:
            return found[1], console
    raise AssertionError(f"{path.name} never came to an end")
