"""The script of docs/elastic.md, as the page says: one replica begins, another joins, one is killed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from members_processes import started

from forks import COMMAND, Fork

PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"


def test_a_killed_replica_is_started_again_and_joins(tmp_path: Path) -> None:
    text, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    line = "torchrun --standalone --nproc-per-node 1 train.py"
    assert line in PAGE.read_text()
    (tmp_path / "train.py").write_text(text.replace("epochs = 400", "epochs = 14"))
    env = {"TACIT_KERNELS": "reference", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started() as members:
        env["TACIT_MEMBERS"] = f"127.0.0.1:{members.port}"

        def replica() -> "subprocess.Popen[str]":
            words = [sys.executable, COMMAND, *line.split()]
            return Fork(words, env=os.environ | env, cwd=tmp_path, start_new_session=True, **pipes)

        def until(process: "subprocess.Popen[str]", what: str) -> str:
            assert process.stdout is not None
            for said in process.stdout:
                if re.search(what, said):
                    return said
            raise AssertionError(process.communicate()[1])

        with replica() as first:
            until(first, "1 members")
            with replica() as second:
                until(second, "2 members")
                os.killpg(second.pid, signal.SIGKILL)
                second.wait()
            until(first, "1 members")
            with replica() as third:
                said = until(third, "2 members")
                assert "epoch 0," not in said
                ends = [each.communicate(timeout=100) for each in (first, third)]
                assert [each.returncode for each in (first, third)] == [0, 0], ends
