"""The first process of a testbed; the command starts it as a fresh interpreter and talks to it by a socket.

With namespaces it makes a PID namespace and forks; the child is PID 1 in there, holds the networks open, and
the kernel kills all that lives in the namespace when PID 1 ends. Each process has asked the kernel to be
killed with the one above it, so the whole testbed ends with the command, however the command ends. Without
namespaces this process adopts all orphans below it and kills them when the socket closes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback

from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import wire
from tacit_lab.testbed.network.linux import adopt_orphans, die_with_parent
from tacit_lab.testbed.supervisor import Supervisor


def main(argv: list[str]) -> int:
    """Serve the command `argv[1]`, a process, over the open socket `argv[0]`, the cluster `argv[2]`."""
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    parent, cluster = int(argv[1]), Cluster.parse(argv[2])
    with control:
        try:
            return _isolated(control, parent, cluster) if cluster.namespaces else _plain(control, parent)
        except TestbedError as error:
            wire.send(control, {"error": str(error)})
        except Exception:
            wire.send(control, {"error": f"the testbed could not be built.\n{traceback.format_exc()}"})
    return 1


def _plain(control: socket.socket, parent: int) -> int:
    """Supervise processes that live among the others of this machine."""
    adopt_orphans()
    supervisor = Supervisor(control)
    die_with_parent(signal.SIGTERM)  # not SIGKILL: there is no kernel that would end the others
    scratch = tempfile.mkdtemp(prefix="tacit-")
    try:
        if os.getppid() == parent:
            wire.send(control, {"ready": True, "scratch": scratch})
            supervisor.serve()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _isolated(control: socket.socket, parent: int, cluster: Cluster) -> int:
    """Fork PID 1 of a new PID namespace, and stay until it is gone."""
    from tacit_lab.testbed.network import namespaces

    namespaces.leave()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    alive, held = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(held)
        return _first_process(control, alive, cluster)
    control.close()
    os.close(alive)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])


def _first_process(control: socket.socket, parent_alive: int, cluster: Cluster) -> int:
    """Be PID 1: furnish the namespaces, then supervise."""
    from tacit_lab.testbed.network import links, namespaces

    die_with_parent(signal.SIGKILL)
    if select.select([parent_alive], [], [], 0)[0]:  # closed: the parent ended before the line above
        return 1
    scratch = namespaces.furnish(cluster.places)
    fabric = links.build(cluster)
    supervisor = Supervisor(control, fabric.nodes, fabric.relay)
    wire.send(control, {"ready": True, "scratch": f"/proc/1/fd/{scratch}"})
    supervisor.serve()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter would take a third of a second to free what it has imported
