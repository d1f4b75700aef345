"""A member's connections to a hub: its texts, its collectives, and who else is connected."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.errors import AttachError, ConfigError, PayloadError, PeerLost, ServerLost, first_line
from tacit.failure.bounded_store import StoreConnection
from tacit.stores.client.connecting import open_channel
from tacit.stores.client.placement import addresses, shared_secret
from tacit.stores.hub.hub import MOST_TEXT
from tacit.stores.protocol import ALL, FrameKind, Header, as_body
from tacit.stores.secret import Secret
from tacit.stores.tls import TlsWorker, find_tls
from tacit.transports.member_links import Board, Meeting, meeting_at
from tacit.transports.relayed_group import Done

_log = logging.getLogger("tacit")
EXAMPLE = "TACIT_HUB=first:29600+second:29600"
_LOOK = 2.0
"""Seconds to look who is at a hub of several."""
_PATIENCE = 60.0
"""Seconds without a sign of the hub's machine after which the system gives a connection up."""


class AskedHub(StoreConnection):
    """A store whose calls are questions to a hub."""

    def ask(self, *asked: Any) -> Any:
        """The answer to a question; see `HubLink`."""
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        found = self.ask("get", key)
        if found is None:
            raise RuntimeError(f"the hub has no {key!r}")
        return str(found).encode()

    def set(self, key: str, value: str) -> None:
        self.ask("set", key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self.ask("add", key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self.ask("check", keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return str(self.ask("compare_set", key, expected, value)).encode()

    def append(self, key: str, value: str) -> None:
        """As torch's stores do."""
        self.ask("append", key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(each).encode() for each in self.ask("multi_get", keys)]


class HubLink(AskedHub):
    """One connection; any thread may ask.

    Args:
        address: host and port of the hub.
        secret: that hub and members share.
        tls: which certificates are trusted; None: it speaks no TLS.
        seconds: to connect, and for each answer to a question.
        me: this member's name, where it takes part in collectives.

    Raises:
        AttachError: it is not trusted, or has another secret or version.
        RuntimeError: it cannot be reached.
    """

    hubs = 1

    def __init__(
        self,
        address: tuple[str, int],
        secret: Secret,
        tls: TlsWorker | None,
        seconds: float,
        me: str = "",
    ) -> None:
        self._me = me
        self.name = f"the hub at {address[0]}:{address[1]}"
        self._seconds = seconds
        self._numbers = itertools.count(1)
        self._open: dict[int, Done] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        try:
            self._channel = open_channel(address, secret, seconds, self.name, tls)
        except ServerLost as error:
            raise RuntimeError(first_line(error)) from error
        self._channel.set_patience(_PATIENCE)
        self._thread = threading.Thread(target=self._listen, name="tacit-hub", daemon=True)
        self._thread.start()

    # ---- questions ------------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """Why it is gone; None: as far as is known, it is there."""
        return self._failure

    def ask(self, *asked: Any) -> Any:
        """The hub's answer to a question.

        Raises:
            RuntimeError: there is none.
            AttachError: it is no hub.
        """
        came = threading.Event()
        found: list[Tensor | BaseException] = []

        def done(answer: Tensor | BaseException) -> None:
            found.append(answer)
            came.set()

        self._send(FrameKind.ASK, as_body(json.dumps(asked).encode()), done)
        if not came.wait(self._seconds):
            raise RuntimeError(f"{self.name} has not answered within {self._seconds:g} s")
        if isinstance(found[0], AttachError):
            raise found[0]
        if isinstance(found[0], BaseException):
            raise RuntimeError(first_line(found[0])) from found[0]
        return json.loads(found[0].numpy().tobytes())

    # ---- collectives ----------------------------------------------------------------------------------

    def share(
        self, group: str, about: Mapping[str, Any], body: Sequence[Tensor], done: Done, hub: int = 0
    ) -> None:
        """Send a share of a collective; see `HubConnection`."""
        text = json.dumps({"group": group, "by": self._me, **about}).encode()
        head = torch.frombuffer(bytearray(len(text).to_bytes(4, "big") + text), dtype=torch.uint8)
        # A copy: whoever has asked may write there as soon as a call has failed.
        self._send(FrameKind.SHARE, [torch.cat([head, *body])], done)

    def quit(self, group: str) -> None:
        """Take no more part in a group."""
        with contextlib.suppress(OSError):
            self._channel.send(Header(FrameKind.LEAVE), as_body(group.encode()))

    # ---- frames ---------------------------------------------------------------------------------------

    def _send(self, kind: FrameKind, body: Sequence[Tensor], done: Done) -> None:
        number = next(self._numbers)
        with self._lock:
            failure = self._failure
            if failure is None:
                self._open[number] = done
        if failure is not None:
            done(failure)
            return
        try:
            self._channel.send(Header(kind, sequence=number), body)
        except OSError as error:
            self._fail(error)

    def _listen(self) -> None:
        try:
            while True:
                header = self._channel.header()
                if header.kind == FrameKind.DROPPED:
                    why = self._channel.text(header, MOST_TEXT).decode(errors="replace")
                    if header.spec == ALL:  # as parameter servers write it
                        raise AttachError(f"{self.name} is no hub. It has answered: {why}")
                    raise ServerLost(why)
                answer = torch.empty(header.nbytes, dtype=torch.uint8)
                self._channel.body(answer)
                with self._lock:
                    done = self._open.pop(header.sequence, None)
                if done is None:
                    continue
                if header.kind == FrameKind.ANSWER:
                    done(answer)
                else:
                    kind = PayloadError if header.kind == FrameKind.REFUSED else PeerLost
                    done(kind(answer.numpy().tobytes().decode(errors="replace")))
        except Exception as error:
            self._fail(error)
        finally:
            self._channel.close()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                gone = RuntimeError(f"{self.name} is gone: {first_line(error)}")
                self._failure = error if isinstance(error, AttachError) else gone
            failure = self._failure
            waiting, self._open = [*self._open.values()], {}
        for done in waiting:
            done(failure)
        self._channel.drop()

    def close(self) -> None:
        """End the connection."""
        self._fail(RuntimeError("it was closed"))


class HubTies:
    """Who is connected to the hub; see `members.ties.Ties`.

    Args:
        connect: makes a connection of this object alone.
        me: the name of this member's rank.
    """

    address = ("hub", 1)
    """Nobody connects to this member; that it has one says that it can be watched."""

    def __init__(self, connect: Callable[[], HubLink], me: str) -> None:
        self._connect, self._me = connect, me
        self._link: HubLink | None = None
        try:
            self._find([])
        except RuntimeError:
            self.close()
            raise

    def broken(self, watched: Mapping[str, tuple[str, int]]) -> list[str]:
        """Of the members to watch, those whose connection has ended, as this hub has seen."""
        try:
            return self._find([*watched])
        except RuntimeError:  # silence tells
            if self._link is not None and self._link.failure is not None:
                self.close()  # the hub is away; if it is slow, its end would look like that of this member
            return []

    def _find(self, names: list[str]) -> list[str]:
        if self._link is None:
            self._link = self._connect()
            self._link.ask("here", self._me)
        return [str(each) for each in self._link.ask("gone", names)]

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None


class HubWay:
    """How members find and reach each other by a hub; see `members.ways.Way`.

    Args:
        text: host:port, or several with commas, of which one hub at a time is there.
        place: which of several it is that share the parameters out, from 1, and how many they are.
        trains: whether this is a member, and not somebody who looks on.

    Raises:
        ConfigError: it is none, or there is no secret.
    """

    longest_pause, carries, hubs = 2.0, True, 1

    def __init__(self, text: str, place: tuple[int, int] = (1, 1), trains: bool = True) -> None:
        self._addresses = addresses(text)
        if not self._addresses:
            raise ConfigError(f"a hub is missing: write host:port for each, such as {EXAMPLE}")
        self._place, self._trains = f"{place[0]} of {place[1]}", trains
        self._first, self._alone = place[0] == 1, place[1] == 1
        self._secret, self._tls = shared_secret(), find_tls()
        self._which: int | None = None
        self._was_there, self._told = False, ""
        self.name = f"the hub at {text}"
        self.start = "python -m tacit.stores.server --min 1 --max 64 --host 0.0.0.0 --port PORT"

    def connected(self, seconds: float, me: str = "") -> HubLink:
        """A connection that nobody else uses: to the address that answered last, or the next one.

        Raises:
            AttachError: at first: it is not trusted, or does not trust this member. When a hub was there
                before, whoever has its place now ends no training: members look for theirs.
            RuntimeError: there is none.
        """
        if self._which is None:
            self._which = self._busy(min(seconds, _LOOK))
        try:
            with contextlib.ExitStack() as failed:
                link = HubLink(self._addresses[self._which], self._secret, self._tls, seconds, me)
                failed.callback(link.close)
                if self._trains and not (self._alone and self._was_there):
                    self._claim(link)
                failed.pop_all()
        except (AttachError, RuntimeError) as error:
            self._which = (self._which + 1) % len(self._addresses)
            if not isinstance(error, AttachError) or not self._was_there:
                raise
            if str(error) != self._told:
                self._told = str(error)
                _log.warning("a hub was there before, and is waited for: %s", error)
            raise RuntimeError(first_line(error)) from error
        self._was_there, self._told = True, ""
        return link

    def _claim(self, link: HubLink) -> None:
        """Check that all members have this hub in one place of their list."""
        theirs = link.compare_set("place", "", self._place).decode()
        if theirs != self._place:
            raise AttachError(
                f"{link.name} is hub {theirs} to other members, and {self._place} to this one: write the "
                f"same hubs in the same order for all, such as {EXAMPLE}"
            )

    def _busy(self, seconds: float) -> int:
        """The address at which members are: an empty hub beside theirs would be a second training."""
        for host, port in self._addresses:
            found = _addresses_of(host, port)
            if len(found) > 1:
                _log.warning(
                    "%s is the name of %d machines, %s: members of two hubs train without each other. Write "
                    "the address of one",
                    *(host, len(found), " and ".join(found)),
                )
        busy: dict[bytes, int] = {}
        for i, address in enumerate(self._addresses if len(self._addresses) > 1 else ()):
            with (
                contextlib.suppress(RuntimeError),
                contextlib.closing(HubLink(address, self._secret, self._tls, seconds)) as link,
            ):
                if link.check(["period" if self._first else "place"]):
                    busy.setdefault(link.get("hub"), i)
        if len(busy) > 1:
            names = " and at ".join(":".join(map(str, self._addresses[i])) for i in busy.values())
            _log.warning(
                "members are at %s, and train without each other: run one hub at a time. This one goes to "
                "the first",
                names,
            )
        return next(iter(busy.values()), 0)

    def ties(self, me: str) -> HubTies:
        """Who is connected."""
        return HubTies(partial(self.connected, 2.0), me)

    def meeting(
        self, name: str, me: str, limit: timedelta, is_off: Callable[[], bool], ask: Board | None = None
    ) -> Meeting:
        """Where the members of a period make groups, whose collectives go by the hub."""
        link = self.connected(limit.total_seconds(), me)
        return meeting_at(link, name, limit, is_off, link.close)


def _addresses_of(host: str, port: int) -> list[str]:
    """Of IPv4, or where there are none of IPv6."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        kinds = {kind: sorted({str(each[4][0]) for each in found if each[0] == kind}) for kind, *_ in found}
        return kinds.get(socket.AF_INET) or next(iter(kinds.values()), [])
    return []
