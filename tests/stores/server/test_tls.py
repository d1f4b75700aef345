"""A parameter server behind TLS: who is let in, who is refused, and what each of them is told."""

from __future__ import annotations

import os
import random
import socket
import ssl
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from shared_secret import SECRET
from worker_threads import MODEL, PIECE, N, each, join, push

import attacks
from in_process_command import called
from tacit.contracts import PayloadSpec, PushPull
from tacit.errors import AttachError, ConfigError, ServerLost
from tacit.stores import handshake
from tacit.stores.messages import RunSpec
from tacit.stores.server.__main__ import main
from tacit.stores.server.process import ServerProcess
from tacit.stores.tls import TlsServer, TlsWorker, find_tls, fingerprints, why_refused
from tacit.topologies import Star
from tacit_lab.certificates import make

Serve = Callable[..., ServerProcess]
NOW = datetime.now(UTC)


def made(folder: Path, name: str, *names: str, begins: datetime | None = None) -> tuple[Path, Path]:
    files = folder / f"{name}.pem", folder / f"{name}.key"
    make(names or ("localhost", "127.0.0.1"), 30, *files, begins)
    return files


def known(files: tuple[Path, Path]) -> str:
    return fingerprints(files[0])[0]


def refusal(host: ServerProcess, tls: TlsWorker | None) -> str:
    with pytest.raises(AttachError) as caught:
        join(host, 0, 1, tls=tls)
    return str(caught.value)


def eventually(so: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not so() and time.monotonic() < until:
        time.sleep(0.02)
    return so()


@pytest.fixture
def hub(tmp_path: Path) -> tuple[Path, Path]:
    return made(tmp_path, "hub")


@pytest.mark.parametrize("by", ["fingerprint", "fingerprints", "openssl's", "file"])
def test_workers_train_by_tls_as_without(by: str, serve: Serve, hub: tuple[Path, Path]) -> None:
    host, hexadecimal = serve(2, tls=TlsServer(*hub)), known(hub).removeprefix("sha256:")
    trusted = {
        "fingerprint": known(hub),
        "fingerprints": f"{'0' * 64}, {known(hub)}",
        "openssl's": ":".join(hexadecimal[i : i + 2].upper() for i in range(0, 64, 2)),
        "file": str(hub[0]),
    }
    servers = [join(host, i, tls=TlsWorker(trusted[by])) for i in range(2)]
    for step in range(3):
        means = each(
            *(lambda s=s, i=i, n=step: push(s, torch.full((N,), n + 2.0 * i)) for i, s in enumerate(servers))
        )
        for mean in means:
            assert torch.equal(mean, torch.full((N,), step + 1.0)), mean
    for server in servers:
        server.close()


def test_what_is_longer_than_any_buffer_comes_whole_both_ways_at_once(
    serve: Serve, hub: tuple[Path, Path]
) -> None:
    n = 3_000_000
    model, tls = (("a", (n,), "float32", None),), TlsWorker(known(hub))
    host = serve(2, tls=TlsServer(*hub))
    servers = [join(host, i, model=model, tls=tls) for i in range(2)]
    piece, back = PayloadSpec(PIECE.codec, n, torch.float32), PayloadSpec(None, n, torch.float32)
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    asked = [
        [server.post(PushPull(((x + bucket,),), (piece,), (back,)), f"a/{bucket}") for bucket in range(3)]
        for server, x in zip(servers, xs, strict=True)
    ]
    for answers in asked:
        for bucket, answer in enumerate(answers):
            assert answer.done.wait(60)
            expected = (xs[0] + bucket) / 2
            assert torch.equal(answer.answer()[0][0], expected.add_(xs[1] + bucket, alpha=0.5))
    for server in servers:
        server.close()


def test_another_certificate_is_refused_before_the_secret_is_used(
    serve: Serve, hub: tuple[Path, Path], tmp_path: Path
) -> None:
    host, other = serve(1, tls=TlsServer(*hub)), made(tmp_path, "other")
    said = refusal(host, TlsWorker(known(other)))
    assert f"shows the certificate {known(hub)}" in said
    assert "is not trusted by TACIT_TLS" in refusal(host, TlsWorker(str(other[0])))
    assert "is not trusted by TACIT_TLS=system" in refusal(host, TlsWorker("system"))


@pytest.mark.parametrize(
    ("names", "begins", "wrong"),
    [
        (("hub.example.org",), NOW, "is for another name .*: write the name that it is for"),
        ((), NOW - timedelta(days=40), f"has run out .by this machine's clock it is {NOW.year}"),
        ((), NOW + timedelta(days=2), "is not valid yet .*: set the clock"),
    ],
    ids=["name", "old", "future"],
)
def test_a_certificate_that_does_not_hold_is_told(
    names: tuple[str, ...],
    begins: datetime,
    wrong: str,
    serve: Serve,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = made(tmp_path, "hub", *names, begins=begins)
    host = serve(1, tls=TlsServer(*files))
    told = [each.partition("hub.pem ")[2].partition(" (")[0] for each in caplog.messages]
    assert told == {NOW: []}.get(begins, ["has run out" if begins < NOW else "is not valid yet"])
    with pytest.raises(AttachError, match=wrong):
        join(host, 0, 1, tls=TlsWorker(str(files[0])))
    # A fingerprint names one certificate, whatever is written in it.
    join(host, 0, 1, tls=TlsWorker(known(files))).close()


def test_plain_text_and_tls_tell_each_other(
    serve: Serve, hub: tuple[Path, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.stores.server.listener._SILENT_SECONDS", 0.3)
    assert "speaks TLS: set TACIT_TLS to the fingerprint" in refusal(serve(1, tls=TlsServer(*hub)), None)
    assert eventually(lambda: "it does not speak TLS, as this server does" in caplog.text)
    assert "does not speak TLS: start it with --tls" in refusal(serve(1), TlsWorker(known(hub)))
    said = "it speaks TLS, and this server was started without --tls"
    assert eventually(lambda: said in caplog.text)


def test_a_server_tells_its_clock_with_a_date_that_does_not_hold() -> None:
    error = ssl.SSLCertVerificationError(1, "")
    error.verify_code, error.verify_message = 10, "certificate has expired"
    said = "its certificate does not hold now: certificate has expired; by this machine's clock it is "
    assert why_refused(error).startswith(f"{said}{NOW.year}")


def test_older_tls_is_refused(serve: Serve, hub: tuple[Path, Path]) -> None:
    host = serve(1, tls=TlsServer(*hub))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", host.port)) as line, pytest.raises(ssl.SSLError):
        context.wrap_socket(line)


def test_another_secret_is_refused_inside_of_tls(serve: Serve, hub: tuple[Path, Path]) -> None:
    other = handshake.Secret(b"the secret of somebody else")
    with pytest.raises(AttachError, match="has another secret"):
        join(serve(1, tls=TlsServer(*hub)), 0, 1, secret=other, tls=TlsWorker(known(hub)))


# ---- certificates of workers --------------------------------------------------------------------------


def test_a_worker_shows_a_certificate_until_it_is_taken_out_of_the_file(
    serve: Serve, hub: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = (made(tmp_path, name, name) for name in ("one", "two", "three"))
    old = made(tmp_path, "old", begins=NOW - timedelta(days=40))
    several = tmp_path / "workers.pem"
    several.write_text("".join(files[0].read_text() for files in (one, two, old)))
    host = serve(2, timeout=5.0, tls=TlsServer(*hub, several))
    servers = [join(host, i, tls=TlsWorker(known(hub), *files)) for i, files in enumerate((one, two))]
    said = refusal(host, TlsWorker(known(hub)))
    assert "asks for a certificate, and none is shown: make one by tacit certificate NAME" in said
    assert eventually(lambda: "it has shown no certificate" in caplog.text)
    for files in (three, old):
        assert "has refused this worker's certificate" in refusal(host, TlsWorker(known(hub), *files))
    several.write_text(one[0].read_text())
    assert eventually(lambda: "may not connect any more" in caplog.text)
    with pytest.raises(ServerLost):  # it is out at once
        push(servers[1], torch.ones(N))
    assert "has refused this worker's certificate" in refusal(host, TlsWorker(known(hub), *two))
    servers[0].close()
    several.write_text("")
    tls = host._listener._tls
    assert tls is not None
    assert eventually(lambda: not tls.admits(known(one)))
    assert "has refused this worker's certificate" in refusal(host, TlsWorker(known(hub), *one))


@pytest.mark.parametrize(
    "name", ["garbage", "http", "tls", "slowloris", "truncated", "wrong_secret", "silent"]
)
def test_an_attack_behind_tls(
    name: str, serve: Serve, hub: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    monkeypatch.setattr("tacit.stores.server.liveness._HELLO_SECONDS", 1.0)
    mine = made(tmp_path, "mine")
    tls = TlsWorker(known(hub), *mine)
    host = serve(1, tls=TlsServer(*hub, mine[0]))
    server = join(host, 0, 1, tls=tls)
    overheard = handshake.reply(SECRET, handshake.greeting())
    about = RunSpec(Star(), (), MODEL)
    at = attacks.Target(("127.0.0.1", host.port), SECRET, overheard, about, 1, seconds=0.3, many=20, tls=tls)
    seen = attacks.ATTACKS[name].run(at, random.Random(0))
    assert seen.opened == seen.ended > 0
    assert torch.equal(push(server, torch.ones(N)), torch.ones(N))
    server.close()


# ---- what is refused before anything starts -----------------------------------------------------------


def test_files_that_do_not_belong_together(tmp_path: Path, hub: tuple[Path, Path]) -> None:
    other, nothing = made(tmp_path, "other"), tmp_path / "nothing"
    nothing.write_text("no certificate\n")
    for files, wrong in (
        ((hub[0], other[1]), "is no key for the certificate in .*: it is that of another"),
        ((hub[0], hub[0]), "others on this machine can read the key"),
        ((nothing, hub[1]), "nothing has no certificate: make one"),
        ((tmp_path / "gone", hub[1]), "gone has no certificates .*No such file"),
        ((*hub, nothing), "nothing has no certificate: put those of the workers"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            TlsServer(*files)
    os.chmod(hub[1], 0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {hub[1]}, and write another key"):
        TlsServer(*hub)


def test_what_a_worker_trusts(tmp_path: Path, hub: tuple[Path, Path]) -> None:
    assert find_tls({}) is None
    assert find_tls({"TACIT_TLS": "system"}) is not None
    for environment, wrong in (
        ({"TACIT_TLS": "sha256:12"}, "TACIT_TLS=sha256:12 is no fingerprint"),
        ({"TACIT_TLS": str(hub[1])}, "the file has no certificate"),
        ({"TACIT_TLS_KEY": "a"}, "belong together"),
        ({"TACIT_TLS_KEY": str(hub[1]), "TACIT_TLS_CERTIFICATE": str(hub[0])}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            find_tls(environment)


def test_options_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workers", "1", "--port", "0", "--certificates", "workers.pem"]
    assert main(words) == 2
    assert "--certificates are shown by TLS alone" in capsys.readouterr().err


def test_the_command_makes_both_or_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = called("certificate", "hub.example.org", "203.0.113.5", "::1", "--out", "mine")
    assert done.code == 0, done
    assert known((tmp_path / "mine.pem", tmp_path / "mine.key")) in done.out
    TlsServer(tmp_path / "mine.pem", tmp_path / "mine.key")
    assert "is there already" in called("certificate", "a", "--out", "mine").err
    assert "'a b' is no name" in called("certificate", "a b").err
    monkeypatch.setitem(sys.modules, "cryptography", None)
    done = called("certificate", "hub.example.org", "203.0.113.5")
    assert "-addext subjectAltName=DNS:hub.example.org,IP:203.0.113.5" in done.out
    assert not (tmp_path / "hub.pem").exists()
