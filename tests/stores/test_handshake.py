"""The messages by which server and worker prove to each other that they know the secret."""

from __future__ import annotations

import struct

import pytest

from tacit.errors import AttachError
from tacit.stores import handshake
from tacit.stores.handshake import Verdict
from tacit.stores.secret import Secret

OURS, THEIRS = Secret(b"the secret of the two"), Secret(b"the secret of another")
NAME = "server 0 (host:1)"


def test_who_knows_the_secret_is_welcome_and_so_is_the_server() -> None:
    greeting = handshake.greeting()
    assert len(greeting) == handshake.GREETING_BYTES
    handshake.check_greeting(greeting, NAME)
    reply = handshake.reply(OURS, greeting)
    assert len(reply) == handshake.REPLY_BYTES
    verdict, message = handshake.judged(OURS, greeting, reply)
    assert verdict is Verdict.WELCOME
    assert len(message) == handshake.VERDICT_BYTES
    handshake.check_verdict(OURS, greeting, reply, message, NAME)


def test_another_secret_is_refused_by_both() -> None:
    greeting = handshake.greeting()
    reply = handshake.reply(THEIRS, greeting)
    verdict, message = handshake.judged(OURS, greeting, reply)
    assert verdict is Verdict.WRONG_SECRET
    with pytest.raises(
        AttachError, match=r"server 0 .* has another secret than this worker: give both the same"
    ):
        handshake.check_verdict(THEIRS, greeting, reply, message, NAME)
    # One that only says it is the server.
    for lie in (bytes([Verdict.WELCOME]) + bytes(32), bytes([Verdict.WELCOME]) + reply[-32:], message):
        with pytest.raises(AttachError, match="has another secret"):
            handshake.check_verdict(OURS, greeting, reply, lie, NAME)


def test_a_handshake_is_of_no_use_a_second_time() -> None:
    first, second = handshake.greeting(), handshake.greeting()
    assert first != second
    reply = handshake.reply(OURS, first)
    assert handshake.judged(OURS, first, reply)[0] is Verdict.WELCOME
    assert handshake.judged(OURS, second, reply)[0] is Verdict.WRONG_SECRET
    assert handshake.reply(OURS, first) != reply


def test_any_bit_that_is_changed_is_noticed() -> None:
    greeting = handshake.greeting()
    reply = handshake.reply(OURS, greeting)
    for i in range(8 * len(reply)):
        changed = bytearray(reply)
        changed[i // 8] ^= 1 << i % 8
        assert handshake.judged(OURS, greeting, bytes(changed))[0] is not Verdict.WELCOME


def test_what_does_not_begin_as_a_worker_does_is_known_at_once() -> None:
    reply = handshake.reply(OURS, handshake.greeting())
    assert all(handshake.may_be(reply[:n]) for n in range(len(reply) + 1))
    for stranger in (b"GET / HTTP/1.1", b"\x16\x03\x01", b"t\x00", bytes(76)):
        assert not handshake.may_be(stranger)
        whole = stranger.ljust(handshake.REPLY_BYTES, b"\0")
        assert handshake.judged(OURS, handshake.greeting(), whole)[0] is Verdict.NO_WORKER


@pytest.mark.parametrize("where", [8, 10], ids=["frames", "payloads"])
def test_another_version_is_named_by_both(where: int) -> None:
    greeting = bytearray(handshake.greeting())
    (ours,) = struct.unpack_from("<H", greeting, where)
    struct.pack_into("<H", greeting, where, ours + 1)
    with pytest.raises(AttachError, match=r"is of another version of tacit .*: install the same version"):
        handshake.check_greeting(bytes(greeting), NAME)
    greeting = bytearray(handshake.greeting())
    reply = bytearray(handshake.reply(OURS, bytes(greeting)))
    struct.pack_into("<H", reply, where, ours + 1)
    verdict, message = handshake.judged(OURS, bytes(greeting), handshake.versions(bytes(reply)))
    assert verdict is Verdict.OTHER_VERSION
    with pytest.raises(AttachError, match="is of another version of tacit: install the same version"):
        handshake.check_verdict(OURS, bytes(greeting), bytes(reply), message, NAME)


def test_what_is_no_server_is_said() -> None:
    with pytest.raises(AttachError, match="is no parameter server of tacit: check its address"):
        handshake.check_greeting(b"HTTP/1.1 400 Bad Request".ljust(44), NAME)
