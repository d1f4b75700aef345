"""A command of tacit on a disk of 256 KiB, in a fork of the fork server.

    small_disk.py DISK LEFT BESIDE WORD...

Mounts it on the folder DISK for this process alone, starts what the shell is told by BESIDE, calls the
command, and copies to LEFT what is on the disk in the end. Ranks are forks as well.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import forks
from forked_testbeds import forked_testbeds
from tacit_lab import cli
from tacit_lab.testbed.network.linux import Clone, Mount, mount, unshare


def alone_with(disk: str) -> None:
    """Namespaces of its own, as of `unshare -Urm`; and the disk."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(Clone.USER | Clone.MOUNT)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    mount("none", "/", None, Mount.RECURSIVE | Mount.PRIVATE)
    mount("tmpfs", disk, "tmpfs", Mount.NOSUID, "size=256k")


def begin(request: dict[str, Any]) -> None:
    """A testbed, in a fork of this process."""
    os._exit(fork_server.run(request["argv"], request["env"]))


if __name__ == "__main__":
    disk, left, beside, *words = sys.argv[1:]
    alone_with(disk)
    forks.use_a_fork(begin)
    spoils = subprocess.Popen(["sh", "-c", beside], stderr=subprocess.DEVNULL)
    sys.argv = ["tacit", *words]
    code: Any = 0
    try:
        with forked_testbeds():
            cli.main()
    except SystemExit as end:
        code = end.code
    spoils.wait()
    shutil.copytree(disk, left)
    sys.exit(code)
