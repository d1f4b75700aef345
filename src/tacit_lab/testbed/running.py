"""Follows one run: passes lines on, stops all nodes when one fails, and finds out who failed first."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tacit import files
from tacit.errors import TestbedError
from tacit_lab.testbed import wire
from tacit_lab.testbed.churn import HUB_AWAY, Churn
from tacit_lab.testbed.failure_attribution import Node, agreed, parted, silent
from tacit_lab.testbed.outputs import OnLine, Output
from tacit_lab.testbed.results import TIMED_OUT, Failure, Relayed, Result

GRACE = 5.0
"""Seconds that the other nodes have to print their errors once one has failed."""

RETURN = 2.0
"""Seconds that the launchers have to end once all their ranks have, and one node has failed."""

DISMISSAL = 5.0
"""Seconds that parameter servers have to end once all ranks have."""

SAVING = 120.0
"""Seconds that they have where they keep a checkpoint: the last one is written when all workers have left."""

HALT = 3.0
"""Seconds that a rank may stay stopped (by SIGSTOP) once all others have ended well."""

_NAP = 3600.0
"""Seconds: the system's own clock for waiting ends at some weeks."""

TERMINATION = 3.0
"""Seconds between SIGTERM and SIGKILL."""

LOOK = 0.25
"""Seconds between two looks whether all replicas are at work."""

CLOSING = 10.0
"""Seconds that replicas which come and go have to end once the first of them has: who has just come back may
have missed the others, and would train alone."""


class RunMonitor:
    """One run, from the moment that its launchers are started."""

    def __init__(
        self,
        control: socket.socket,
        count: int,
        on_line: OnLine | None,
        timeout: float | None,
        servers: int = 0,
        alone: bool = False,
        holding: bool = False,
        ranks_per_node: int = 1,
        saving: bool = False,
    ) -> None:
        """Prepare to follow.

        Args:
            control: The socket to the supervisor.
            count: How many nodes there are.
            on_line: Gets every line; None prints them.
            timeout: Seconds until all is killed.
            servers: How many more nodes there are, of parameter servers; they end with the others.
            alone: Whether a node goes on when another has failed, as long as the servers do.
            holding: Whether tracebacks that end ranks are in the result alone, and not printed.
            ranks_per_node: How many ranks each has, in order.
            saving: Whether the servers keep a checkpoint.
        """
        self._control = control
        self._nodes = [Node(number) for number in range(count)]
        self._nodes += [Node(count + number, number) for number in range(servers)]
        self._on_line = on_line
        self._alone, self._saving = alone, saving
        self._churn: Churn | None = None
        self._messages: dict[int, Mapping[str, Any]] = {}
        self._returning: set[int] = set()
        self._hub_back = 0.0
        self._holding, self._ranks_per_node = holding, ranks_per_node
        self._outputs: list[Output] = []
        self._start = time.monotonic()
        self._limit = None if timeout is None else self._start + timeout
        self._first_failure: float | None = None
        self._dismissed: float | None = None
        self._notes: list[str] = []
        self._relayed: Relayed | None = None
        self._terminated: float | None = None
        self._sweeping = self._swept = self._timed_out = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def _pipes(self, number: int) -> tuple[int, int]:
        """The ends to write to of the pipes for a node's stdout and stderr; the caller closes them."""
        ends = []
        for stream in (sys.stdout, sys.stderr):
            read, write = os.pipe()
            node = self._nodes[number]
            output = Output(node, stream, self._on_line, self._note, self._holding and node.server is None)
            self._outputs.append(output)
            self._selector.register(read, selectors.EVENT_READ, output)
            ends.append(write)
        return ends[0], ends[1]

    def start(self, message: Mapping[str, Any]) -> None:
        """Have the supervisor start a node by this message."""
        self._messages[message["node"]] = message
        ends = self._pipes(message["node"])
        try:
            wire.send(self._control, message, ends)
        finally:
            for end in ends:
                os.close(end)

    def relay(self) -> None:
        """Have the supervisor delay packets until the run is over, if the network needs that."""
        wire.send(self._control, {"do": "relay"})

    def churn(self, churn: Churn) -> None:
        """Have nodes go and come back by this schedule; a server is then a hub, which ends last."""
        self._churn = churn

    def store(self, message: Mapping[str, Any]) -> None:
        """Have the supervisor run the members' store until the run is over."""
        wire.send(self._control, {"do": "store", **message})

    def load(self, node: int, rate: float) -> None:
        """Have the supervisor send so many bit/s out of a node until the run is over."""
        wire.send(self._control, {"do": "load", "node": node, "rate": rate})

    def follow(self) -> Result:
        """Wait for the end of all nodes."""
        while not self._swept or len(self._selector.get_map()) > 1:
            for key, _ in self._selector.select(self._patience()):
                if key.data is None:
                    self._hear()
                else:
                    self._read(key)
            for output in self._outputs:
                output.flush(time.monotonic())
            self._decide()
        return self._result()

    def close(self) -> None:
        """Close the pipes; what was held is printed."""
        for output in self._outputs:
            output.flush()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                os.close(key.fd)
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 1 << 16)
        if not data:
            self._selector.unregister(key.fd)
            os.close(key.fd)
        key.data.feed(data)

    def _hear(self) -> None:
        received = wire.receive(self._control)
        if received is None:
            raise TestbedError("the supervisor of the testbed was killed, and all its programs with it")
        message = received[0]
        if "swept" in message:
            self._swept = True
        elif "lost" in message:
            if not self._sweeping:
                raise TestbedError(
                    f"{message['lost']} has ended (exit code {message['code']}), and what is measured would "
                    "be without it: run it again"
                )
            if message["relayed"] is not None:
                self._relayed = Relayed(*message["relayed"])
        else:
            self._nodes[message["ended"]].end(message["code"])

    def _note(self, note: str) -> None:
        """Print a rank's note that something could not be written, once for all ranks."""
        if note not in self._notes:
            self._notes.append(note)
            files.say(note)

    def _patience(self) -> float | None:
        """Seconds until the next decision, or to look once more; None when only an event can bring one."""
        marks = [output.until for output in self._outputs if output.until < math.inf]
        if self._sweeping:
            return max(0.0, min(marks) - time.monotonic()) if marks else None
        marks += [] if self._limit is None else [self._limit]
        if self._churn is not None and not self._churn.over:
            marks.append(time.monotonic() + LOOK if self._churn.due is None else self._churn.due)
        if self._hub_back:
            marks.append(max(self._hub_back, time.monotonic() + LOOK))
        if (first := self._first_ended) is not None:
            marks.append(first + CLOSING)
        if self._terminated is not None:
            marks.append(self._terminated + TERMINATION)
            return max(0.0, min(marks) - time.monotonic())
        if self._dismissed is not None:
            marks.append(self._dismissed + self._dismissal)
        if self._first_failure is not None:
            marks.append(self._first_failure + self._grace())
        if (since := self._waiting_since()) is not None:
            marks.append(since + HALT)
        return min(max(0.0, min(marks) - time.monotonic()), _NAP) if marks else None

    def _decide(self) -> None:
        if self._sweeping:
            return
        now = time.monotonic()
        if self._churn is not None and self._first_failure is None:
            self._churn_on(self._churn, now)
        if (
            any(node.code and not self._bearable(node) for node in self._nodes)
            and self._first_failure is None
        ):
            self._first_failure = now
        running = [node for node in self._nodes if node.code is None]
        if running and all(node.server is not None for node in running) and self._dismissed is None:
            self._dismissed = now
        if not running:
            self._sweep()
        elif self._terminated is not None:
            self._terminate(running)
        elif self._dismissed is not None and now >= self._dismissed + self._dismissal:
            if not self._saving:  # else it is a failure: the checkpoint is not that of the end
                self._stop(running)
            self._terminate(running)
        elif self._limit is not None and now >= self._limit:
            self._timed_out = True
            self._stop(running)
            self._sweep()
        elif (first := self._first_ended) is not None and now >= first + CLOSING:
            self._stop(running)
            self._sweep()
        elif self._first_failure is not None and now >= self._first_failure + self._grace():
            self._escalate(running)
        elif (since := self._waiting_since()) is not None and now >= since + HALT:
            self._terminate(running)

    @property
    def _workers(self) -> list[Node]:
        """The nodes that have ranks."""
        return [node for node in self._nodes if node.server is None]

    @property
    def _ranks(self) -> int:
        return len(self._workers) * self._ranks_per_node

    def _waiting_since(self) -> float | None:
        """Since when stopped ranks are all that has not ended well; None where others are at work."""
        halted = [since for node in self._workers for since in node.halted.values()]
        well = [when for node in self._workers for when in node.well.values()]
        if not halted or not well or len(halted) + len(well) < self._ranks:
            return None
        return max(*halted, *well)

    @property
    def _dismissal(self) -> float:
        return 0.0 if self._churn is not None else SAVING if self._saving else DISMISSAL

    def _grace(self) -> float:
        """Seconds to print errors; fewer once all ranks but stopped ones have ended."""
        over = sum(len({*node.halted, *node.well, *node.reports}) for node in self._workers)
        return RETURN if over >= self._ranks else GRACE

    def _bearable(self, failed: Node) -> bool:
        went = self._churn is not None and failed.stopped
        return went or (failed.server is None and self._alone)

    @property
    def _first_ended(self) -> float | None:
        """When the first of replicas that come and go has ended well; None where one is awaited."""
        ended = [when for node in self._workers for when in node.well.values()]
        return min(ended, default=None) if self._churn is not None else None

    def _churn_on(self, churn: Churn, now: float) -> None:
        """Have a replica go if it is time, and those start again that are due back and have ended."""
        if self._first_ended is not None:
            churn.end()
        self._churn_hub(churn, now)
        if churn.over:
            if churn.away is not None:
                self._strike(churn.away.node, signal.SIGKILL)
            return
        for node in [each for each in self._returning if self._nodes[each].code is not None]:
            self._returning.remove(node)
            self._nodes[node] = Node(node)
            self.start(self._messages[node])
            churn.came_back(node)
        present = [each.number for each in self._workers if each.code is None and not each.stopped]
        if churn.is_due(now) and present:
            if (away := churn.away) is not None and away.what == "killed":
                self._returning.add(away.node)
            elif away is not None:
                self._strike(away.node, signal.SIGCONT)
                self._nodes[away.node].resume()
                churn.came_back(away.node)
            event = churn.strike(present)
            self._strike(event.node, signal.SIGKILL if event.what == "killed" else signal.SIGSTOP)

    def _churn_hub(self, churn: Churn, now: float) -> None:
        """Have the hub go if it is time, and start it again."""
        for node in [each for each in self._nodes if each.server is not None]:
            if self._hub_back and now >= self._hub_back and node.code is not None:
                self._hub_back = 0.0
                self._nodes[node.number] = Node(node.number, node.server)
                self.start(self._messages[node.number])
            elif not churn.over and churn.hub_is_due(now):
                self._hub_back = now + HUB_AWAY
                self._strike(node.number, signal.SIGKILL)

    def _strike(self, node: int, number: signal.Signals) -> None:
        """Send a signal to all processes of a node; it is no failure that they end."""
        self._nodes[node].stop()
        if self._nodes[node].code is None:
            wire.send(self._control, {"do": "strike", "node": node, "signal": number})

    def _escalate(self, running: Sequence[Node]) -> None:
        self._stop(running)
        self._terminate(running)

    def _terminate(self, running: Sequence[Node]) -> None:
        """Ask for the end of nodes, whose own failure it is if they were not stopped before."""
        if self._terminated is None:
            self._terminated = time.monotonic()
            for node in running:
                wire.send(self._control, {"do": "signal", "node": node.number, "signal": signal.SIGTERM})
        elif time.monotonic() >= self._terminated + TERMINATION:
            self._sweep()

    def _stop(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.stop()

    def _sweep(self) -> None:
        self._sweeping = True
        wire.send(self._control, {"do": "sweep"})

    def _guilty(self) -> Failure | None:
        """The rank that failed, if others' reports show it."""
        per = self._ranks_per_node
        return parted(self._nodes) or silent(self._nodes, per) or agreed(self._nodes, per)

    def _result(self) -> Result:
        failed = sorted((node for node in self._nodes if node.failed), key=lambda node: node.order)
        code = (failed[0].code or 0) if failed else 0
        seconds = time.monotonic() - self._start
        failures = [node.failure() for node in failed]
        apart = self._alone or self._churn is not None
        guilty = None if self._timed_out or apart else self._guilty()
        if guilty is not None:
            failures = [guilty, *(each for each in failures if each.rank != guilty.rank)]
        endings = sorted(
            (each for node in self._nodes for each in node.endings()), key=lambda each: each[0].order
        )
        return Result(
            TIMED_OUT if self._timed_out else code,
            tuple(failures),
            self._timed_out,
            seconds,
            tuple(self._notes),
            tuple(ending for _, ending in endings),
            self._relayed,
        )
