"""The hub itself: it keeps the members' texts, and carries out their collectives.

Each connection has a thread that receives; what all share is under one lock. Members keep the state of the
training: a hub that is started again is filled by them, so it saves nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.environment import SERVERS
from tacit.errors import PayloadError, PeerLost, TacitError
from tacit.stores.hub.bounds import Bounds, Norms, norms
from tacit.stores.hub.collectives import ShareSpec, answers, read_spec
from tacit.stores.protocol import Channel, FrameKind, Header, as_body
from tacit.stores.secret import Secret
from tacit.stores.server.listener import Listener, RejectionLog
from tacit.stores.tls import TlsServer

_log = logging.getLogger("tacit")

MOST_TEXT = 1 << 24
_MOST_SHARE = 1 << 34
_LENGTH = 4
CONNECTIONS = 4
"""That one member may have at once, with those that it is about to close."""


@dataclass(eq=False)
class _Peer:
    """A connection.

    Attributes:
        here: under which name it says that its member is alive.
        groups: in which it takes part.
    """

    channel: Channel
    address: str
    here: str = ""
    groups: set[str] = field(default_factory=set)

    def call(self, name: str) -> None:
        """Note its name."""
        self.here = name


@dataclass
class _Collective:
    specs: dict[int, ShareSpec] = field(default_factory=dict)
    shares: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[int, Norms] = field(default_factory=dict)
    asked: dict[int, tuple[_Peer, int]] = field(default_factory=dict)


@dataclass
class _Group:
    """Attributes: over: why nothing comes of it any more; peers: those that have not quit."""

    over: str = ""
    peers: set[_Peer] = field(default_factory=set)
    under_way: dict[str, _Collective] = field(default_factory=dict)

    def end(self, why: str) -> None:
        """Nothing comes of it from now on; the first reason counts."""
        self.over = self.over or why


class Hub:
    """Serves as long as the object is not closed.

    Args:
        where: the address to listen on, and the port; 0 for any that is free.
        secret: that members have, too.
        members: how many there must be, and how many there may be.
        tls: its certificate, and those that members must show; None: plain text.
        clip: see `Bounds`.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        where: tuple[str, int],
        secret: Secret,
        members: tuple[int, int],
        tls: TlsServer | None = None,
        clip: float | None = None,
    ) -> None:
        self._bounds = Bounds(clip)
        self._texts: dict[str, str] = {"limits": json.dumps(members), "hub": uuid.uuid4().hex}
        self._most = CONNECTIONS * members[1] + 16
        self._peers: set[_Peer] = set()
        self._here: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        self._rejections = RejectionLog()
        self._listener = Listener(*where, secret, self._admit, self._rejections, tls)
        self.port = self._listener.port

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        with self._lock:
            peers = [*self._peers]
        for peer in peers:
            peer.channel.drop()

    @property
    def members(self) -> list[str]:
        """The names of those that are connected."""
        with self._lock:
            return sorted(self._here)

    def _admit(self, channel: Channel, address: str) -> None:
        peer = _Peer(channel, address)
        with self._lock:
            full = len(self._peers) >= self._most
            if not full:
                self._peers.add(peer)
        if full:
            why = f"{self._most} connections are open, as many as --max allows"
            self._rejections.note(address, why)
            with contextlib.suppress(OSError):
                channel.send(Header(FrameKind.DROPPED), as_body(why.encode()))
            channel.close()
            return
        threading.Thread(target=self._serve, args=(peer,), name="tacit-hub", daemon=True).start()

    # ---- one connection, in its thread --------------------------------------------------------------------

    def _serve(self, peer: _Peer) -> None:
        try:
            while True:
                self._hear(peer, peer.channel.header())
        except OSError:
            pass
        except Exception as error:
            why = (
                str(error)
                if isinstance(error, TacitError | ValueError)
                else f"{type(error).__name__}: {error}"
            )
            self._rejections.note(peer.address, f"a member sent an invalid frame: {why:.300}")
            with contextlib.suppress(OSError):
                peer.channel.send(Header(FrameKind.DROPPED), as_body(why.encode(errors="replace")[:1000]))
                peer.channel.drain(1.0)
        finally:
            self._gone(peer)
            peer.channel.close()

    def _hear(self, peer: _Peer, header: Header) -> None:
        if header.kind == FrameKind.ASK:
            asked = json.loads(peer.channel.text(header, MOST_TEXT))
            with self._lock:
                found = self._asked(peer, asked)
            answer = json.dumps(found).encode()
            peer.channel.send(Header(FrameKind.ANSWER, sequence=header.sequence), as_body(answer))
        elif header.kind == FrameKind.SHARE:
            if not _LENGTH <= header.nbytes <= _MOST_SHARE:
                raise PayloadError(f"a share of {header.nbytes} bytes")
            whole = torch.empty(header.nbytes, dtype=torch.uint8)
            peer.channel.body(whole)
            about = _LENGTH + int.from_bytes(whole[:_LENGTH].numpy().tobytes(), "big")
            spec = read_spec(whole[_LENGTH:about].numpy().tobytes())
            share = whole[about:].clone()  # so that numbers lie where their type wants them
            found = Norms() if self._bounds.clip is None else norms(spec, share)
            with self._lock:
                self._shared(peer, header.sequence, spec, share, found)
        elif header.kind == FrameKind.LEAVE:
            name = peer.channel.text(header, MOST_TEXT).decode(errors="replace")
            with self._lock:
                self._quit(peer, name, "a member has left this exchange")
        else:
            raise PayloadError(
                f"a frame of kind {header.kind}, as workers of parameter servers send, where this is a hub "
                f"of members: let {SERVERS} name servers that were started with --workers in place of --min"
            )

    # ---- texts --------------------------------------------------------------------------------------------

    def _asked(self, peer: _Peer, asked: Any) -> Any:
        """Answer as a store of torch's does."""
        if not isinstance(asked, list) or not asked:
            raise PayloadError("a question that is none")
        texts = self._texts
        match asked:
            case ["get", str(key)]:
                return texts.get(key)
            case ["set", str(key), str(value)]:
                texts[key] = value
                return None
            case ["add", str(key), int(amount)]:
                texts[key] = str(int(texts.get(key, "0")) + amount)
                return int(texts[key])
            case ["check", list(keys)]:
                return all(key in texts for key in keys)
            case ["compare_set", str(key), str(expected), str(value)]:
                if texts.get(key, "") != expected:
                    return texts.get(key, expected)
                texts[key] = value
                return value
            case ["append", str(key), str(value)]:
                texts[key] = texts.get(key, "") + value
                return None
            case ["multi_get", list(keys)]:
                return [texts.get(str(key), "") for key in keys]
            case ["here", str(name)]:
                if not self._here[name]:
                    _log.warning("%s is here, from %s", _said(name), peer.address)
                self._here[name] += not peer.here
                self._seen.add(name)
                peer.call(name)
                return None
            case ["gone", list(names)]:
                return [name for name in names if name in self._seen and name not in self._here]
        raise PayloadError(f"a question that no member asks: {asked[0]!r:.40}")

    # ---- collectives --------------------------------------------------------------------------------------

    def _shared(self, peer: _Peer, number: int, spec: ShareSpec, share: Tensor, found: Norms) -> None:
        group = self._groups.setdefault(spec.group, _Group())
        group.peers.add(peer)
        peer.groups.add(spec.group)
        if group.over:
            self._refuse(peer, number, PeerLost(group.over))
            return
        which = group.under_way.setdefault(spec.key, _Collective())
        others = next(iter(which.specs.values()), spec)
        if others.together != spec.together or spec.rank in which.specs:
            text = f"a share of {spec.do!r}, where others are at {others.do!r}"
            self._refuse(peer, number, PeerLost(text))
            return
        which.specs[spec.rank], which.shares[spec.rank], which.norms[spec.rank] = spec, share, found
        which.asked[spec.rank] = peer, number
        if len(which.specs) < spec.waits_for:
            return
        sizes = {rank: each.numel() for rank, each in which.shares.items()}
        refused = self._bounds.refused(which.specs, sizes, which.norms)
        for rank, why in refused.items():
            self._put_out(*which.asked.pop(rank), which.specs[rank], why)
        if refused:
            return
        del group.under_way[spec.key]
        try:
            answer = answers(which.specs, which.shares)
        except PayloadError as error:
            for each in which.asked.values():
                self._refuse(*each, PeerLost(str(error)))
            return
        for rank, (to, asked) in which.asked.items():
            self._send(to, Header(FrameKind.ANSWER, sequence=asked), answer[rank])

    def _put_out(self, peer: _Peer, number: int, spec: ShareSpec, why: str) -> None:
        """Refuse a member's share, and end the group: the others begin their round again without it."""
        name = f"{spec.by or 'a member':.100} ({peer.address})"
        _log.warning("%s is put out: %s", name, why)
        self._refuse(peer, number, PayloadError(f"the hub has put this member out: {why}"))
        self._quit(peer, spec.group, f"{name} was put out: {why}")

    def _refuse(self, peer: _Peer, number: int, error: Exception) -> None:
        kind = FrameKind.PEER_LOST if isinstance(error, PeerLost) else FrameKind.REFUSED
        self._send(peer, Header(kind, sequence=number), as_body(str(error).encode()))

    @staticmethod
    def _send(peer: _Peer, header: Header, body: Sequence[Tensor]) -> None:
        try:
            peer.channel.send(header, body)
        except OSError:
            peer.channel.drop()  # its own thread learns of it

    def _quit(self, peer: _Peer, name: str, why: str) -> None:
        """End a group: nothing comes of it without one of its ranks."""
        peer.groups.discard(name)
        group = self._groups.get(name)
        if group is None:
            return
        group.peers.discard(peer)
        group.end(why)
        for which in group.under_way.values():
            for other, number in which.asked.values():
                if other is not peer:
                    self._refuse(other, number, PeerLost(group.over))
        group.under_way.clear()
        if not group.peers:
            del self._groups[name]
            self._bounds.forget(name)

    def _gone(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
            if peer.here:
                self._here[peer.here] -= 1
                if self._here[peer.here] <= 0:
                    del self._here[peer.here]
                    _log.warning("%s is gone", _said(peer.here))
            for name in [*peer.groups]:
                self._quit(peer, name, "a member's connection has ended")


def _said(name: str) -> str:
    """A member's name, without what makes it unique, and without its rank."""
    return f"{name.rsplit('/', 2)[0]:.100}"
