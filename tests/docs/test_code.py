"""Every block of Python on the pages is Python, and runs: on one rank of Gloo, all in one process.

A block that makes its own process group is a script, and is run as its page says.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, ROOT, Block, blocks, shell_lines
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cases import for_each
from forks import COMMAND, ran

HERE = Path(__file__).resolve().parent
PYTHON = [block for page in PAGES for block in blocks(page) if block.language == "python"]
DIFFS = [block for page in PAGES for block in blocks(page) if block.language == "diff"]
SCRIPTS = [block for block in PYTHON if "init_process_group" in block.text]
RUN = [block for block in PYTHON if not block.fragment and block not in SCRIPTS]
ENV = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TACIT_KERNELS": "reference",  # it compiles nothing
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """For each block what went wrong."""
    env = os.environ | ENV | {"GROUP_RANK": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / "run_blocks.py")],
        input=json.dumps([(str(block), block.text) for block in RUN]),
        cwd=tmp_path_factory.mktemp("reader"),
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_there_are_blocks() -> None:
    assert {"getting-started.md", "migrating.md", "extending.md"} <= {b.page.name for b in RUN}


@for_each("block", PYTHON, ids=str)
def test_a_block_is_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", DIFFS, ids=str)
def test_both_sides_of_a_diff_are_python(block: Block) -> None:
    for other in "+-":
        lines = [line[1:] for line in block.text.splitlines() if not line.startswith(other)]
        compile("\n".join(lines), str(block), "exec")


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs(block: Block, outcomes: dict[str, str | None]) -> None:
    went_wrong = outcomes[str(block)]
    assert went_wrong is None, went_wrong


def torchrun(line: str, text: str, folder: Path) -> str:
    """What a script prints that is started by this line of a page."""
    given, _, words = line.partition("torchrun ")
    *command, name = ["torchrun", *shlex.split(words)]
    script = folder / Path(name).name
    script.write_text(text)
    env = ENV | dict(word.split("=", 1) for word in given.split())
    done = ran(COMMAND, *command, str(script), cwd=folder, seconds=300, **env)
    assert done.code == 0, done.err
    return done.out


def line_of(page: Path) -> str:
    """The line that starts the page's script."""
    (line,) = {each for each in shell_lines(page) if re.match(r"(\w+=\S+ )*torchrun --nproc-per-node", each)}
    return line


RESTART = {"checkpoints.md": ("else 40", 40, 1), "two-places.md": ("steps, folder = 45", 45, 2)}
"""Pages whose script restarts: where it says its last step, which that is, and fewer ranks than there."""
ELASTIC = ROOT / "examples" / "13_elastic.py"


ELSEWHERE = {"elastic.md", "parameter-servers.md"}
"""Pages whose script is run by tests of its own: tests/members/test_elastic_page.py, tests/stores/client."""


@pytest.mark.parametrize(
    "block", [each for each in SCRIPTS if each.page.name not in {*RESTART, *ELSEWHERE}], ids=str
)
def test_a_script_runs_as_its_page_says(block: Block, tmp_path: Path) -> None:
    assert re.search("topk|diloco|lowbit|accuracy", torchrun(line_of(block.page), block.text, tmp_path))


def killed(text: str) -> str:
    """The same script, of which rank 1 dies at step 15 when it is started for the first time."""
    step = "        optimizer.step()\n"
    first = 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"'
    assert text.count(step) == 1
    return text.replace(
        step, f"{step}        if step == 15 and rank == 1 and {first}:\n            os.kill(os.getpid(), 9)\n"
    )


def whole_file(name: str, folder: Path) -> Any:
    """What a script saved in the end."""
    saved = folder / "checkpoints" / name
    if not (saved / ".metadata").exists():
        return torch.load(saved / "0.pt")
    dcp_to_torch_save(saved, folder / "whole.pt")
    return torch.load(folder / "whole.pt")


@pytest.mark.parametrize("name", RESTART)
def test_a_killed_rank_begins_at_the_last_checkpoint_and_so_do_fewer(name: str, tmp_path: Path) -> None:
    steps, last, fewer = RESTART[name]
    page = ROOT / "docs" / name
    script = next((each.text for each in SCRIPTS if each.page == page), ELASTIC.read_text())
    line = line_of(page)
    if "--max-restarts" not in line:  # torchrun's own, which the page has in its text
        line = line.replace(" train.py", " --standalone --max-restarts 3 train.py")
        line = f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {line}"
        assert line in " ".join(page.read_text().split())
    ends = {}
    for which, text in ("whole", script), ("killed", killed(script)):
        (tmp_path / which).mkdir()
        assert f"after {last} steps" in torchrun(line, text, tmp_path / which)
        ends[which] = whole_file(f"{last}-2", tmp_path / which)["model"]
    assert all(torch.equal(ends["killed"][each], ends["whole"][each]) for each in ends["whole"])
    alone = re.sub(r"node \d", f"node {fewer}", line)
    assert script.count(steps) == 1
    longer = script.replace(steps, steps.replace(str(last), "60"))
    assert "after 60 steps" in torchrun(alone, longer, tmp_path / "whole")
    assert (tmp_path / "whole" / "checkpoints" / "latest").read_text() == "60-1"


def test_there_is_a_script() -> None:
    assert {"README.md", "getting-started.md"} <= {block.page.name for block in SCRIPTS}
