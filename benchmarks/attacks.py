"""What strangers on the network, and bad peers that know the secret, may do to a parameter server.

Each attack is a function of its own, of a `Target` and a random generator, and gives how many connections it
has opened and how many of these the server has ended. `strangers.py` runs them while a training is under way.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from tacit.contracts import PayloadSpec
from tacit.stores import encoding, handshake
from tacit.stores.messages import Hello, MessageSpec, RunSpec
from tacit.stores.protocol import FrameKind, Header
from tacit.stores.secret import Secret
from tacit.stores.tls import TlsWorker
from tacit.topologies import Asynchronous, Star

FORM = struct.Struct("<4qd2q")
PATIENCE = 15.0
"""Seconds within which a server must have ended a connection that it is to end."""


@dataclass(frozen=True)
class Target:
    """A server, and what an attacker knows of it.

    Attributes:
        secret: for a peer that knows it.
        overheard: what a worker has sent to prove itself, on another connection.
        run: what its workers have in common; `workers`: how many there are.
        free: the number of a worker whose place is free; None where none is.
        seconds: how long to go on with what needs time; `many`: how many connections are many.
        source: the address to come from; None: any. Of each, a server says why it has closed connections.
        tls: how to speak TLS, with a certificate that the server takes; None: it speaks none.
    """

    address: tuple[str, int]
    secret: Secret
    overheard: bytes
    run: RunSpec
    workers: int
    free: int | None = None
    seconds: float = 2.0
    many: int = 1000
    source: str | None = None
    tls: TlsWorker | None = None


class Seen(NamedTuple):
    """Of an attack: connections that it has opened, and those that the server has ended."""

    opened: int
    ended: int


Attack: TypeAlias = Callable[[Target, random.Random], Seen]
Who: TypeAlias = Literal["stranger", "insider", "worker"]


class Known(NamedTuple):
    """An attack, and who makes it: somebody without the secret, with it, or a worker of the training."""

    who: Who
    run: Attack

    @property
    def words(self) -> str:
        """What it does."""
        return (self.run.__doc__ or "").strip().partition("\n")[0].rstrip(".")


ATTACKS: dict[str, Known] = {}
SPARED = frozenset({"scans", "idle", "flood", "crowd", "reset"})
"""Of these not every connection is one that the server is to end."""


def by(who: Who) -> Callable[[Attack], Attack]:
    """Note an attack."""

    def note(run: Attack) -> Attack:
        ATTACKS[run.__name__.strip("_")] = Known(who, run)
        return run

    return note


# ---- what attacks are made of -------------------------------------------------------------------------


def dialled(target: Target) -> socket.socket:
    """A connection to the server."""
    source = None if target.source is None else (target.source, 0)
    return socket.create_connection(target.address, timeout=5, source_address=source)


def ended(line: socket.socket, seconds: float = PATIENCE) -> bool:
    """Whether the server ends the connection, within so long."""
    deadline = time.monotonic() + seconds
    with line:
        while time.monotonic() < deadline:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                if not line.recv(1 << 16):
                    return True
            except TimeoutError:
                return False
            except OSError:
                return True
    return False


def tell(line: socket.socket, data: bytes) -> None:
    """Send, if there still is somebody."""
    with contextlib.suppress(OSError):
        line.sendall(data)


def said(target: Target, *messages: bytes) -> Seen:
    """Each on a connection of its own, without waiting for the server's word."""
    lines = []
    for message in messages:
        lines.append(dialled(target))
        tell(lines[-1], message)
    return Seen(len(lines), sum(ended(line) for line in lines))


def greeted(target: Target) -> tuple[socket.socket, bytes]:
    """A connection, and the server's greeting."""
    line = dialled(target)
    if target.tls is not None:
        line = target.tls.begin(line, target.address[0], "the server")
    return line, exactly(line, handshake.GREETING_BYTES)


def exactly(line: socket.socket, size: int) -> bytes:
    """So many bytes of what the server says.

    Raises:
        ConnectionError: it says less.
    """
    got = b""
    while len(got) < size:
        part = line.recv(size - len(got))
        if not part:
            raise ConnectionError(f"the server has ended the connection, {len(got)} of {size} bytes came")
        got += part
    return got


def answered(target: Target, answer: Callable[[bytes], bytes]) -> Seen:
    """A reply to the greeting, made of it."""
    line, greeting = greeted(target)
    tell(line, answer(greeting))
    return Seen(1, ended(line))


def inside(target: Target) -> socket.socket:
    """A connection on which the handshake was right."""
    line, greeting = greeted(target)
    reply = handshake.reply(target.secret, greeting)
    line.sendall(reply)
    verdict = exactly(line, handshake.VERDICT_BYTES)
    handshake.check_verdict(target.secret, greeting, reply, verdict, "the server")
    return line


def frame(kind: int, body: bytes = b"", nbytes: int | None = None, **fields: Any) -> bytes:
    """A frame; `nbytes`: what it says of its length."""
    header = Header(kind, nbytes=len(body) if nbytes is None else nbytes, **fields)
    return FORM.pack(*header) + body


def hello(target: Target, worker: int, **changes: Any) -> Hello:
    """What a worker says first."""
    return replace(Hello(worker, target.workers, 0, "another process", 20.0, target.run), **changes)


def framed(message: Any) -> bytes:
    """It as a HELLO frame."""
    return frame(FrameKind.HELLO, encoding.write(message))


def insiders(target: Target, *messages: bytes) -> Seen:
    """As `said`, behind right handshakes."""
    lines = []
    for message in messages:
        lines.append(inside(target))
        tell(lines[-1], message)
    return Seen(len(lines), sum(ended(line) for line in lines))


def seated(target: Target) -> socket.socket:
    """A connection that is welcome as a worker whose place was free.

    Raises:
        ConnectionError: the server would not have it.
    """
    assert target.free is not None
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline:
        line = inside(target)
        line.sendall(framed(hello(target, target.free)))
        header = Header(*FORM.unpack(exactly(line, FORM.size)))
        why = exactly(line, header.nbytes)
        if header.kind == FrameKind.ANSWER:
            return line
        line.close()  # the one before is still being sent away
        time.sleep(0.1)
    raise ConnectionError(f"the place is taken: {why.decode(errors='replace')}")


def declared(target: Target, number: int = 1, **changes: Any) -> bytes:
    """A DECLARE of the first bucket."""
    name, shape, *_ = target.run.model[0]
    numel = 1
    for size in shape:
        numel *= size
    back = PayloadSpec(None, numel, _FLOAT)
    message = replace(MessageSpec(f"{name}/0", (), (back,), back), **changes)
    return frame(FrameKind.DECLARE, encoding.write(message), spec=-number)


def workers(target: Target, *messages: bytes) -> Seen:
    """As `said`, each as the worker whose place is free."""
    count = 0
    for message in messages:
        line = seated(target)
        tell(line, message)
        count += ended(line)
    return Seen(len(messages), count)


def _float() -> Any:
    import torch

    return torch.float32


_FLOAT = _float()


# ---- strangers ----------------------------------------------------------------------------------------


@by("stranger")
def garbage(target: Target, rng: random.Random) -> Seen:
    """Random bytes, of many lengths."""
    return said(target, *(rng.randbytes(size) for size in (1, 7, 44, 75, 76, 77, 1000, 1 << 16)))


@by("stranger")
def zeros(target: Target, rng: random.Random) -> Seen:
    """A megabyte of zeros."""
    return said(target, bytes(1 << 20))


@by("stranger")
def http(target: Target, rng: random.Random) -> Seen:
    """A browser."""
    return said(target, b"GET / HTTP/1.1\r\nHost: server\r\nConnection: keep-alive\r\n\r\n")


@by("stranger")
def tls(target: Target, rng: random.Random) -> Seen:
    """A client hello of TLS."""
    return said(target, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(505))


@by("stranger")
def ssh(target: Target, rng: random.Random) -> Seen:
    """A banner of SSH, of SMTP, of Redis."""
    return said(target, b"SSH-2.0-OpenSSH_9.6\r\n", b"EHLO there\r\n", b"*1\r\n$4\r\nINFO\r\n")


@by("stranger")
def pickled(target: Target, rng: random.Random) -> Seen:
    """A pickle that would call os.system."""

    class Call:
        def __reduce__(self) -> tuple[Any, ...]:
            import os

            return os.system, ("touch /tmp/tacit-was-called",)

    return said(target, pickle.dumps(Call()), frame(FrameKind.HELLO, pickle.dumps(Call())))


@by("stranger")
def store(target: Target, rng: random.Random) -> Seen:
    """A client of torch's TCPStore, as workers once were."""
    query = struct.pack("<B I", 0, 0x3C85F7CE)
    key = b"init/knock/1"
    setting = b"\x00" + struct.pack("<Q", len(key)) + key + struct.pack("<Q", 7) + b"garbage"
    return said(target, query + setting, setting, struct.pack("<Q", 1 << 62) + key)


@by("stranger")
def gloo(target: Target, rng: random.Random) -> Seen:
    """A peer of Gloo, which says a sequence number."""
    return said(target, *(struct.pack("<q", number) for number in range(8)))


@by("stranger")
def scans(target: Target, rng: random.Random) -> Seen:
    """Port scans: connections that are closed or reset at once."""
    for i in range(100):
        line = dialled(target)
        if i % 2:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()
    return Seen(100, 100)


@by("stranger")
def slowloris(target: Target, rng: random.Random) -> Seen:
    """Fifty connections that send a byte of a reply each second."""
    lines = [greeted(target) for _ in range(50)]
    replies = [handshake.reply(Secret(rng.randbytes(32).hex().encode()), greeting) for _, greeting in lines]
    until = time.monotonic() + target.seconds
    sent = 0
    while time.monotonic() < until and sent < 60:
        for (line, _), reply in zip(lines, replies, strict=True):
            tell(line, reply[sent : sent + 1])
        sent += 1
        time.sleep(min(1.0, target.seconds / 10))
    seconds = max(0.0, handshake.SECONDS + 2 - target.seconds)
    return Seen(50, sum(ended(line, seconds) for line, _ in lines))


@by("stranger")
def idle(target: Target, rng: random.Random) -> Seen:
    """A thousand connections that say nothing."""
    lines = [dialled(target) for _ in range(target.many)]
    time.sleep(target.seconds)
    return Seen(len(lines), sum(ended(line, 0.05) for line in lines))


@by("stranger")
def flood(target: Target, rng: random.Random) -> Seen:
    """Connections as fast as they come, each with some garbage."""
    until, count = time.monotonic() + target.seconds, 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError), dialled(target) as line:
            line.sendall(rng.randbytes(100))
            count += 1
    return Seen(count, count)


@by("stranger")
def unread(target: Target, rng: random.Random) -> Seen:
    """Megabytes to a server of which nothing is read."""
    line, count = dialled(target), 0
    line.settimeout(1)
    with contextlib.suppress(OSError):
        for _ in range(64):
            line.sendall(bytes(1 << 20))
            count += 1
    return Seen(1, ended(line))


@by("stranger")
def half_closed(target: Target, rng: random.Random) -> Seen:
    """A connection that is closed in one direction, before and within a reply."""
    lines = [dialled(target) for _ in range(2)]
    tell(lines[1], target.overheard[:30])
    for line in lines:
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
    return Seen(2, sum(ended(line) for line in lines))


@by("stranger")
def reset(target: Target, rng: random.Random) -> Seen:
    """Resets in the middle of a reply."""
    for size in range(1, handshake.REPLY_BYTES, 5):
        line = dialled(target)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tell(line, target.overheard[:size])
        line.close()
    return Seen(16, 16)


@by("stranger")
def out_of_band(target: Target, rng: random.Random) -> Seen:
    """Urgent data of TCP."""
    line = dialled(target)
    with contextlib.suppress(OSError):
        line.send(b"tacit-ps", socket.MSG_OOB)
        line.sendall(rng.randbytes(100))
    return Seen(1, ended(line))


@by("stranger")
def truncated(target: Target, rng: random.Random) -> Seen:
    """Replies that begin right and stop."""
    lines = [dialled(target) for _ in range(4)]
    for line, size in zip(lines, (1, 8, 44, 75), strict=True):
        tell(line, target.overheard[:size])
    return Seen(4, sum(ended(line) for line in lines))


@by("stranger")
def huge(target: Target, rng: random.Random) -> Seen:
    """Frames that say they are 2^62 bytes long, without a handshake."""
    sizes = (1 << 62, -1, (1 << 63) - 1)
    return said(target, *(frame(kind, nbytes=size) for kind in (1, 2, 5) for size in sizes))


@by("stranger")
def frames(target: Target, rng: random.Random) -> Seen:
    """Right frames of a worker, without a handshake."""
    return said(
        target,
        framed(hello(target, 0)),
        declared(target),
        frame(FrameKind.PUSH, bytes(100), spec=1, sequence=1),
        frame(FrameKind.LEAVE),
    )


@by("stranger")
def replayed(target: Target, rng: random.Random) -> Seen:
    """A worker's reply that was overheard, sent again."""
    behind = target.overheard + framed(hello(target, 1))
    return Seen(*map(sum, zip(said(target, behind), answered(target, lambda _: behind), strict=True)))


@by("stranger")
def reflected(target: Target, rng: random.Random) -> Seen:
    """The server's own greeting sent back, alone and with a proof of its own making."""
    first = answered(target, lambda greeting: greeting + bytes(32))
    second = answered(target, lambda greeting: greeting + greeting[12:44])
    return Seen(first.opened + second.opened, first.ended + second.ended)


@by("stranger")
def wrong_secret(target: Target, rng: random.Random) -> Seen:
    """Replies of somebody who tries secrets."""
    count = 0
    for word in ("password12345678", "tacit-tacit-tacit", rng.randbytes(32).hex(), "0" * 64):
        guess = Secret(word.encode())
        count += answered(target, lambda greeting, guess=guess: handshake.reply(guess, greeting)).ended  # type: ignore[misc]
    return Seen(4, count)


@by("stranger")
def other_versions(target: Target, rng: random.Random) -> Seen:
    """Workers of older and later versions, with the right magic."""
    count = 0
    for version in (0, 1, handshake.VERSION + 1, 0xFFFF):
        reply = target.overheard[:8] + struct.pack("<H", version) + target.overheard[10:]
        count += answered(target, lambda _, reply=reply: reply).ended  # type: ignore[misc]
    return Seen(4, count)


@by("stranger")
def bits(target: Target, rng: random.Random) -> Seen:
    """A reply that was overheard, with bits changed at random."""
    count, tries = 0, 40
    for _ in range(tries):
        changed = bytearray(target.overheard)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        count += answered(target, lambda _, changed=changed: bytes(changed)).ended  # type: ignore[misc]
    return Seen(tries, count)


# ---- peers that know the secret, and have no place ----------------------------------------------------


@by("insider")
def silent(target: Target, rng: random.Random) -> Seen:
    """Connections that prove themselves and then say nothing."""
    lines = []
    for _ in range(min(64, target.many)):
        with contextlib.suppress(OSError):
            lines.append(inside(target))
    return Seen(len(lines), sum(ended(line) for line in lines))


@by("insider")
def half_a_hello(target: Target, rng: random.Random) -> Seen:
    """A HELLO that stops in its middle."""
    whole = framed(hello(target, 0))
    return insiders(target, whole[:20], whole[:60], whole[:-1])


@by("insider")
def impostor(target: Target, rng: random.Random) -> Seen:
    """A HELLO as a worker that is at work."""
    return refused(
        target, *(hello(target, worker) for worker in range(target.workers) if worker != target.free)
    )


def refused(target: Target, *messages: Hello) -> Seen:
    """HELLOs that are answered by a refusal; who was refused is not sent away at once."""
    count = 0
    for message in messages:
        with inside(target) as line:
            line.settimeout(PATIENCE)
            line.sendall(framed(message))
            try:
                count += Header(*FORM.unpack(exactly(line, FORM.size))).kind != FrameKind.ANSWER
            except ConnectionError:
                count += 1
            except TimeoutError:  # it was left without an answer
                pass
    return Seen(len(messages), count)


@by("insider")
def misfits(target: Target, rng: random.Random) -> Seen:
    """HELLOs with numbers, models and time-outs that cannot be."""
    return refused(
        target,
        hello(target, -1),
        hello(target, target.workers),
        hello(target, 1 << 70),
        hello(target, 0, workers=10**9),
        hello(target, 0, server=7),
        hello(target, 0, timeout=-1.0),
        hello(target, 0, timeout=1e300),
        hello(target, 0, run=replace(target.run, model=())),
        hello(target, 0, run=replace(target.run, model=(("a", (1 << 40,), "float32", None),) * 2)),
        hello(target, 0, run=replace(target.run, model=(("a", (1 << 45, 1 << 45), "float32", None),))),
        hello(target, 0, run=replace(target.run, model=(("a", (-4,), "float33", 9),))),
        hello(target, 0, run=replace(target.run, star=Star(Asynchronous(), optimizer="server"))),
        hello(target, 0, run=replace(target.run, optimizers=({"kind": "eval", "x": "1"},))),
    )


@by("insider")
def no_json(target: Target, rng: random.Random) -> Seen:
    """HELLOs that are no JSON, are nested without end, or pickles."""
    bodies = (
        b"",
        b"null",
        b"hello",
        b"[" * 100_000,
        b"9" * 1_000_000,
        b'{"is":' * 10_000,
        b"\xff" * 100,
        pickle.dumps(None),
        pickle.dumps({"worker": 0}),
    )
    return insiders(target, *(frame(FrameKind.HELLO, body) for body in bodies))


@by("insider")
def other_classes(target: Target, rng: random.Random) -> Seen:
    """HELLOs that name classes which no worker may name."""
    plain = json.loads(encoding.write(hello(target, 0)))
    names = (
        "os.system",
        "builtins.eval",
        "subprocess.Popen",
        "tacit.stores.server.process.ServerProcess",
        "x" * 10_000,
        "",
    )
    texts = []
    for name in names:
        plain["run"]["star"] = {"is": name, "command": "touch /tmp/tacit-was-called"}
        texts.append(frame(FrameKind.HELLO, json.dumps(plain).encode()))
    count = 0
    for text in texts:
        with inside(target) as line:
            line.sendall(text)
            count += ended(line, 12)
    return Seen(len(texts), count)


@by("insider")
def not_yet_welcome(target: Target, rng: random.Random) -> Seen:
    """Every other frame before a HELLO."""
    kinds = [kind for kind in FrameKind if kind not in (FrameKind.HELLO, FrameKind.DECLARE)]
    return insiders(target, declared(target), *(frame(kind) for kind in kinds))


@by("insider")
def unknown_kinds(target: Target, rng: random.Random) -> Seen:
    """Frames of kinds that there are not."""
    return insiders(target, *(frame(kind) for kind in (0, -1, 11, 19, 99, 1 << 40, -(1 << 63))))


@by("insider")
def huge_hellos(target: Target, rng: random.Random) -> Seen:
    """HELLOs that say they are larger than memory, or less than nothing."""
    sizes = (1 << 62, (1 << 63) - 1, -1, 1 << 33, encoding.MOST_BYTES + 1)
    return insiders(target, *(frame(FrameKind.HELLO, nbytes=size) for size in sizes))


@by("insider")
def fuzzed(target: Target, rng: random.Random) -> Seen:
    """Right frames with bytes changed at random."""
    whole = [framed(hello(target, 0)), declared(target), frame(FrameKind.PUSH, bytes(64), spec=1, sequence=1)]
    messages = []
    for _ in range(40):
        changed = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 20)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        messages.append(bytes(changed) + rng.randbytes(rng.randint(0, 200)))
    count = 0
    for message in messages:
        line = inside(target)
        tell(line, message)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        count += ended(line)
    return Seen(len(messages), count)


@by("insider")
def crowd(target: Target, rng: random.Random) -> Seen:
    """A hundred connections that prove themselves, all at once."""
    lines = []
    for _ in range(min(100, target.many)):
        with contextlib.suppress(OSError):
            lines.append(inside(target))
    opened, count = len(lines), sum(ended(line, 0.02) for line in lines)
    for line in lines:
        line.close()
    return Seen(opened, count)


# ---- a worker that does what none would ---------------------------------------------------------------


def forms(target: Target, rng: random.Random) -> Iterator[bytes]:
    """Frames that a welcome worker would not send."""
    name = target.run.model[0][0]
    piece = PayloadSpec(None, 4, _FLOAT)
    begun = declared(target)
    yield frame(FrameKind.PUSH, bytes(100), spec=1, sequence=1)
    yield frame(FrameKind.DECLARE, b"[]", spec=-1)
    yield frame(FrameKind.DECLARE, rng.randbytes(1000), spec=-1)
    yield frame(FrameKind.DECLARE, b"", spec=5)
    yield begun + begun
    yield declared(target, key="no such parameter/0")
    yield declared(target, key=f"{name}/../../etc")
    yield declared(target, pieces=(PayloadSpec(None, 1 << 60, _FLOAT),))
    yield declared(target, pieces=(PayloadSpec(None, -1, _FLOAT),))
    yield declared(target, pieces=(PayloadSpec(None, 4, _FLOAT, spans=((0, 1 << 50),)),))
    yield declared(target, pieces=(piece,) * 20_000)
    yield begun + frame(FrameKind.PUSH, bytes(3), spec=1, sequence=1)
    yield begun + frame(FrameKind.PUSH, nbytes=1 << 62, spec=1, sequence=1)
    yield begun + frame(FrameKind.OFFER, bytes(5), spec=1)
    yield begun + frame(FrameKind.ENTER, bytes(5), spec=1)
    yield begun + frame(FrameKind.PUSH, spec=1, sequence=-7)
    yield begun + frame(FrameKind.PUSH, spec=1, sequence=1, lr=float("nan"))
    yield framed(hello(target, 0))
    yield frame(FrameKind.STATS, spec=3)
    yield frame(FrameKind.ANSWER)
    yield frame(FrameKind.LEAVE) + frame(FrameKind.STATS)


@by("worker")
def malformed(target: Target, rng: random.Random) -> Seen:
    """A worker of the training sends frames that cannot be, and comes back after each."""
    return workers(target, *forms(target, rng))


@by("worker")
def many_kinds(target: Target, rng: random.Random) -> Seen:
    """A worker declares kinds of messages without end."""
    name = target.run.model[0][0]
    line, count = seated(target), 0
    with contextlib.suppress(OSError):
        for number in range(1, 100_000):
            line.sendall(declared(target, number, key=f"{name}/{number}", back=None))
            count += 1
    return Seen(1, ended(line))


@by("worker")
def reads_nothing(target: Target, rng: random.Random) -> Seen:
    """A worker asks and asks, and reads no answer."""
    line = seated(target)
    line.settimeout(2)
    until = time.monotonic() + target.seconds
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            line.sendall(frame(FrameKind.STATS) * 100)
    return Seen(1, ended(line))


def named(names: str) -> Mapping[str, Known]:
    """These attacks; all where none is named."""
    return {name: ATTACKS[name] for name in names.split(",")} if names else ATTACKS
