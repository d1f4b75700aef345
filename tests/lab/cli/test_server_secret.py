"""The secret on the command line: where it must come from, and where it must never be seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worker_processes import WorkerProcesses

from forks import ran
from in_process_command import called
from tacit.environment import SERVER_SECRET, SERVER_SECRET_FILE
from tacit.stores.server.__main__ import main

SECRET = "a secret of these tests, and long enough"


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        ((), {}, "no secret was given by which workers and servers know each other: set TACIT_SERVER_SECRET"),
        ((), {"TACIT_SERVER_SECRET": "short"}, "TACIT_SERVER_SECRET has 5 bytes, and fewer than 16 could be"),
        ((), {"TACIT_SERVER_SECRET_FILE": "nowhere"}, "the secret in nowhere cannot be read: No such file"),
        (
            ("--secret-file", "open"),
            {},
            "others on this machine can read the secret in open (its mode is 644)",
        ),
        (("--secret-file", "open"), {"TACIT_SERVER_SECRET": SECRET}, "chmod 600 open"),
        (("--host", "192.0.2.1"), {"TACIT_SERVER_SECRET": SECRET}, "is no address of this machine"),
        (("--port", "99999"), {"TACIT_SERVER_SECRET": SECRET}, "--port 99999 is none"),
        (("--timeout", "0"), {"TACIT_SERVER_SECRET": SECRET}, "--timeout=0.0 is not"),
        (("--timeout", "inf"), {"TACIT_SERVER_SECRET": SECRET}, "--timeout=inf is not"),
        (("--workers", "0"), {"TACIT_SERVER_SECRET": SECRET}, "--workers=0 is not"),
        (("--every", "-1"), {"TACIT_SERVER_SECRET": SECRET}, "--every=-1.0 is not"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    words: tuple[str, ...],
    env: dict[str, str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (SERVER_SECRET, SERVER_SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    Path("open").write_text(SECRET)
    Path("open").chmod(0o644)
    assert main(["--workers", "1", "--port", "1", *words]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert SECRET not in out + err


def test_workers_without_it_are_told_what_to_write() -> None:
    with WorkerProcesses() as processes:
        address, _ = processes.server(1)
        worker = processes.worker(1, 0, "faulty", "ps", "none", TACIT_SERVERS=address, TACIT_SERVER_SECRET="")
        ended = processes.ended(worker)
    assert ended.code == 1
    assert ended.said[-1]["kind"] == "AttachError"
    says = str(ended.said[-1]["says"])
    assert "there is no secret by which servers, or a hub, and those who call them would know" in says
    assert "set TACIT_SERVER_SECRET to the same 16 bytes or more" in says


def test_a_file_will_do(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    with WorkerProcesses() as processes:
        processes.secret = ""
        address, process = processes.server(1, "--secret-file", str(file))
        worker = processes.alone(
            0, 1, "counts", "3", "0", TACIT_SERVERS=address, TACIT_SERVER_SECRET_FILE=file
        )
        ended = processes.ended(worker)
        assert ended.code == 0, ended.text
        assert process.wait(30) == 0


LOOKS = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist, tacit
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
secret = os.environ["TACIT_SERVER_SECRET"].encode()
assert len(secret) == 64
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tacit.attach(model, optimizer, tacit.from_env()) as session:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    shown = [str(each) for each in (session, vars(session), session.active_path, session.servers())]
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes())
        except OSError:
            pass
assert any(b"tacit.stores.server" in line for line in lines)
assert not any(secret in line for line in lines), "on a command line"
assert not any(secret.decode() in each for each in shown)
Path(sys.argv[1], f"rank{dist.get_rank()}").write_bytes(secret)
dist.destroy_process_group()
"""


def test_a_run_makes_one_of_its_own_that_nobody_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one is set outside: one run's workers and servers know each other, and nobody else."""
    (tmp_path / "train.py").write_text(LOOKS)
    kept = tmp_path / "kept"
    secrets = {SECRET}
    for out, ranks in (("a", 1), ("b", 2)):
        words = [
            "run",
            "--cluster",
            f"local:{ranks}",
            "--servers",
            "1",
            "--algorithm",
            "ps-async",
            "--out",
            out,
        ]
        words += ["--out", out, "--checkpoint", str(kept / out), "--json", "--", "train.py", str(tmp_path)]
        if out == "a":
            done = ran("-m", "tacit_lab", *words, cwd=tmp_path, fresh=True)
        else:
            done = called(*words, cwd=tmp_path)
        assert done.code == 0, done.err
        (secret,) = {(tmp_path / f"rank{rank}").read_text() for rank in range(ranks)}
        secrets.add(secret)
        assert secret not in done.out + done.err
        assert json.loads(done.out.splitlines()[-1])["status"] == "ok"
        files = [*(tmp_path / out).rglob("*"), *(kept / out).iterdir()]
        assert not [file for file in files if file.is_file() and secret.encode() in file.read_bytes()]
        monkeypatch.setenv("TACIT_SERVER_SECRET", SECRET)
        monkeypatch.setenv("TACIT_SERVER_SECRET_FILE", str(tmp_path / "nowhere"))
    assert len(secrets) == 3
