from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]

# Where the interpreter lies in root's home, nobody may enter it: show it to him in a mount namespace.
AS_NOBODY = """
set -e
mount --make-rprivate /
if [ -n "$CLOSED" ]; then
    mount --bind "$BASE" "$SPARE"
    mount -t tmpfs -o mode=755 tmpfs "$CLOSED"
    mkdir -p "$BASE"
    mount --bind "$SPARE" "$BASE"
fi
exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"""


def as_nobody(argv: list[str], spare: Path) -> subprocess.CompletedProcess[str]:
    base = Path(sys.base_prefix)
    closed = [folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001]
    environment = {"CLOSED": str(closed[0]) if closed else "", "BASE": str(base), "SPARE": str(spare)}
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", AS_NOBODY, "sh", *argv],
        env=os.environ | environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests are rootless already")
def test_runs_without_root(programs: Path, tmp_path: Path) -> None:
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("needs unshare and setpriv of util-linux")
    if as_nobody(["unshare", "-Ur", "true"], tmp_path).returncode:
        pytest.skip("this system permits user namespaces to root only")
    if as_nobody([sys.executable, "-c", "import tacit, torch"], tmp_path).returncode:
        pytest.skip("this checkout can be read by root only")
    command = [sys.executable, str(programs / "command.py"), "2x1@100mbit", str(programs / "where.py")]
    done = as_nobody(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(part for part in ("node0", "node1") if part in done.stdout) == ["node0", "node1"]

    late = as_nobody([*command[:2], "2x1@100mbit,5ms", *command[3:]], tmp_path)
    missing = "needs /dev/net/tun, which cannot be opened (Permission denied)" in late.stderr
    assert late.returncode == 0 or missing, late.stderr  # it is root's, or everybody's
