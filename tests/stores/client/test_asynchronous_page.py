"""The script of docs/parameter-servers.md, by one worker and a server in this process."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tacit.stores.server.process import ServerProcess
from tacit_lab.testbed.launch import free_port

PAGE = Path(__file__).parents[3] / "docs" / "parameter-servers.md"


def test_a_worker_trains_as_the_page_says(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    server = serve(1)
    launcher = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    tacits = {"SERVERS": f"127.0.0.1:{server.port}", "SERVER_SECRET": "a secret of the tests alone"}
    tacits |= {"WORKER": "0", "WORKERS": "1", "KERNELS": "reference"}
    for name, value in {**launcher, **{f"TACIT_{name}": each for name, each in tacits.items()}}.items():
        monkeypatch.setenv(name, str(value))
    exec(compile(text.replace("range(20)", "range(2)"), str(PAGE), "exec"), {})
    assert re.findall(r"worker 0, epoch (\d): ", capsys.readouterr().out) == ["0", "1"]
    assert server.stats()["pushes"] >= 2 * 128 // 8
