"""Enters the namespaces of a testbed; errors say how to permit them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tacit.errors import TestbedError
from tacit_lab.testbed.network.linux import Clone, Mount, detach, mount, unshare
from tacit_lab.testbed.network.nodes import hosts

_SETTINGS = {
    "kernel.unprivileged_userns_clone": "1",
    "user.max_user_namespaces": "a number above 0",
    "kernel.apparmor_restrict_unprivileged_userns": "0",
}


def leave() -> None:
    """Put the children of this process into a new PID namespace; as root if necessary."""
    if os.geteuid() == 0:
        try:
            unshare(Clone.PID)
            return
        except PermissionError:
            pass  # root of a container, say: try what any user may do
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(Clone.USER | Clone.PID)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise refused(error) from error


def furnish(nodes: int) -> int:
    """As PID 1, make new mounts and a network. Returns an open directory in memory that ends with PID 1."""
    try:
        unshare(Clone.MOUNT | Clone.NETWORK)
        mount("none", "/", None, Mount.RECURSIVE | Mount.PRIVATE)
        scratch = _scratch()
        _bind(scratch, "hosts", hosts(nodes), "/etc/hosts")
        _bind(scratch, "resolv.conf", "", "/etc/resolv.conf")
        detach("/proc")
        mount("proc", "/proc", "proc", Mount.NOSUID | Mount.NODEV | Mount.NOEXEC)
    except OSError as error:
        raise refused(error) from error
    return scratch


def _scratch() -> int:
    # Mounted over /proc for a moment only: what hides no path of the user's can hold no surprise for him,
    # and once detached it lives exactly as long as somebody has it open.
    mount("tmpfs", "/proc", "tmpfs", Mount.NOSUID | Mount.NODEV, "mode=755")
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)


def _bind(scratch: int, name: str, text: str, over: str) -> None:
    """Mount a file with this text over one of the machine's."""
    with open(os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=scratch), "w") as file:
        file.write(text)
    if Path(over).exists():
        mount(f"/proc/{name}", over, None, Mount.BIND)


def refused(error: OSError) -> TestbedError:
    """An error that says what to change where namespaces are not permitted."""
    found = [
        f"{name} is {value}, it must be {wanted}"
        for name, wanted in _SETTINGS.items()
        if (value := _setting(name)) is not None and not _permits(name, value)
    ]
    if error.errno == errno.ENOSPC:
        found = [f"user.max_user_namespaces is {_setting('user.max_user_namespaces')} and used up"]
    causes = "; ".join(found) or (
        "no setting that we know forbids them, so perhaps a container does "
        f"(settings that can: {', '.join(_SETTINGS)})"
    )
    return TestbedError(
        f"this system does not permit the namespaces of a testbed ({error.strerror or error}): {causes}. "
        "Change that, run as root, or do without an emulated network: --cluster local:N."
    )


def _permits(name: str, value: str) -> bool:
    wants_zero = _SETTINGS[name] == "0"
    return (value == "0") == wants_zero


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None
