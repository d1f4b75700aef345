"""What is published: a wheel that works where the repository is not, and beside another package `tacit`."""

import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from clean_environment import Environment

import tacit

REPOSITORY = Path(__file__).parents[2]
TORCHRUN = ("python", "-m", "torch.distributed.run")
INFO = f"torch_tacit-{tacit.__version__}.dist-info"
SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tacit

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(50, 20), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tacit.attach(model, optimizer, "topk:ratio=0.1") as session:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()
    sent = session.metrics()["bytes_out"]
print(f"rank {dist.get_rank()} of {tacit.__file__} sent {sent:.0f} bytes", flush=True)
dist.destroy_process_group()
"""


def test_the_wheel_has_types_weights_and_pages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        metadata = Parser().parsestr(
            files.read(f"torch_tacit-{tacit.__version__}.dist-info/METADATA").decode()
        )
    assert {"tacit/py.typed", "tacit_lab/py.typed", "tacit_lab/reports/page.css"} <= names
    assert {"tacit/prediction/networks/mp2.pt", "tacit/prediction/networks/wnn.pt"} <= names
    assert {name.split("/")[0] for name in names} == {
        "tacit",
        "tacit_lab",
        f"torch_tacit-{tacit.__version__}.dist-info",
    }
    assert (metadata["Name"], metadata["Version"]) == ("torch-tacit", tacit.__version__)
    needed = [each for each in metadata.get_all("Requires-Dist") or () if "extra" not in each]
    assert sorted(each.split(">")[0] for each in needed) == ["numpy", "torch"]


def test_the_sources_make_the_same_package(distributions: Sequence[Path], wheel: Path) -> None:
    sources = next(each for each in distributions if each.name.endswith(".tar.gz"))
    with tarfile.open(sources) as files:
        there = {name.partition("/src/")[2] for name in files.getnames()}
    with zipfile.ZipFile(wheel) as files:
        assert {name for name in files.namelist() if name.startswith("tacit")} <= there


def test_a_script_trains_on_two_ranks(installed: Environment) -> None:
    (installed.folder / "train.py").write_text(SCRIPT)
    said = installed.run(*TORCHRUN, "--nproc-per-node", "2", "train.py").stdout.splitlines()
    assert sorted(line[:6] for line in said) == ["rank 0", "rank 1"]
    assert all(str(installed.folder) in line and "sent 0 bytes" not in line for line in said)


def test_the_command_is_there(installed: Environment) -> None:
    assert "topk" in installed.run("tacit", "list").stdout
    for command in (["tacit"], ["python", "-m", "tacit"]):
        first, second = installed.run(*command, "--version").stdout.splitlines()
        assert first == f"tacit {tacit.__version__}"
        assert second.startswith("torch ")


def test_two_algorithms_are_compared(installed: Environment) -> None:
    options = ["--cluster", "local:2", "--algorithms", "ddp,topk", "--epochs", "1"]
    said = installed.run("tacit", "compare", "digits", *options).stdout
    assert "ddp" in said
    assert "topk" in said


@pytest.mark.parametrize("order", ["before", "after", "removed"])
def test_another_package_of_this_name(order: str, empty: Environment, wheel: Path) -> None:
    """Installed before ours it does no harm; after, or removed with files of ours, the command says so."""
    other = _other(empty.folder)
    for each in (wheel, other) if order == "after" else (other, wheel):
        empty.install(each)
    if order == "removed":
        empty.pip("uninstall", "--yes", "--quiet", "tacit")
    if order == "before":
        assert tacit.__version__ in empty.run("tacit", "--version").stdout
        return
    said = empty.run("tacit", "--version", code=1).stderr
    assert "is not torch-tacit's" in said
    assert "pip install --force-reinstall --no-deps torch-tacit" in said
    assert len(said.splitlines()) == 1


def _other(folder: Path) -> Path:
    """A wheel of another project, as small as can be, whose package is `tacit`."""
    wheel, info = folder / "tacit-0.3.0-py3-none-any.whl", "tacit-0.3.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("tacit/__init__.py", "'''Something else.'''\n")
        files.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tacit\nVersion: 0.3.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        names = ["tacit/__init__.py", *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD"))]
        files.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))
    return wheel


def test_the_version_is_the_same_everywhere() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {tacit.__version__}\n" in citation
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert changes.partition("\n## ")[2].startswith(tacit.__version__)
