"""The support matrix says where each algorithm runs, and claims no run that `tests/cuda` does not make."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import ROOT
from torch import nn

from cases import for_each
from tacit.algorithms import parse
from tacit.algorithms.registry import ENTRIES
from tacit.errors import AttachError
from tacit.kernels.dispatch import emulated_device
from tacit.levels.device_placement import HOST, _needs_host, placed
from tacit.session.buckets import fitting
from tacit.strategy import Strategy

HEAD = '| algorithms | CPU, Gloo | GPU, NCCL | GPU, Gloo, or `exchange_on="host"` |'
RUN, EMULATED, NOT_RUN = "run on one GPU", "tested in emulation", "on the host, not run"
REFUSED = 'with `exchange_on="device"` refused'
AT_ATTACH = "refused at attach"
NAMED = dict(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).named_parameters())


@dataclass(frozen=True)
class Row:
    """One algorithm's row."""

    family: str
    cpu: str
    nccl: str
    host: str

    @property
    def named(self) -> set[str]:
        """The parts that need the host, as the row names them."""
        return set(re.findall(r"`(\w+)`", self.nccl))


def rows() -> Iterator[tuple[str, Row]]:
    lines = (ROOT / "docs" / "support.md").read_text().partition(HEAD)[2].splitlines()[2:]
    for line in lines[: lines.index("")]:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        family, _, names = first.partition(": ")
        for name in names.split(", "):
            yield name.strip("`"), Row(family, *cells)


TABLE = dict(rows())


def assigned(file: str, name: str) -> set[str]:
    """The algorithms in a list of a test that needs a GPU, which is not imported."""
    tree = ast.parse((ROOT / "tests" / "cuda" / file).read_text())
    (value,) = (
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Name)
        and each.targets[0].id == name
    )
    return {text.partition(":")[0] for text in ast.literal_eval(value)}


CHOSEN = "auto"
"""Run by four ranks of NCCL, with a decider that chooses what is run anyway."""
IN_STREAM = (
    assigned("test_one_gpu.py", "GRADIENT")
    | assigned("test_one_gpu.py", "PROGRESS")
    | assigned("gpu_training.py", "BY_ADAM")
)
ON_HOST = assigned("test_one_gpu.py", "ON_HOST") | assigned("gpu_ranks.py", "ALGORITHMS")


def levels(name: str) -> list[Strategy]:
    return [level for level in parse(name).levels if level.subject != "nothing"]


def backend(name: str) -> Any:
    """A process group for a GPU, of this backend."""
    return SimpleNamespace(
        _device_types=(torch.device("cuda"),), _get_backend=lambda _: SimpleNamespace(name=lambda: name)
    )


def why(level: Strategy, by: str) -> str:
    """Why it needs the host; "": it does not."""
    return _needs_host(level, NAMED, fitting(level.compressor, NAMED), backend(by), torch.device("cuda"))


def away(part: object) -> Iterator[str]:
    """What of a strategy says that it is not on the device."""
    if getattr(part, "on_device", True) is False:
        yield type(part).__name__
    for each in part if isinstance(part, tuple) else ():
        yield from away(each)
    for field in fields(part) if is_dataclass(part) else ():
        yield from away(getattr(part, field.name))


SOMEWHERE = [name for name in ENTRIES if levels(name)]
"""Those that exchange something."""
LAYERWISE = {name for name in ENTRIES if parse(name).levels[0].overlap.layerwise}


def test_what_is_refused_on_the_host_goes_layer_by_layer() -> None:
    assert {name for name, row in TABLE.items() if row.host == AT_ATTACH} == LAYERWISE


def test_the_table_of_what_stays_on_the_host_names_these_algorithms() -> None:
    text = (ROOT / "docs" / "gpus.md").read_text().partition("| on the host | why |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z0-9-]+)`", text))
    assert named & {*TABLE} == {name for name, row in TABLE.items() if REFUSED in row.nccl}


def test_every_algorithm_has_one_row_of_its_family() -> None:
    assert [name for name, _ in rows()] == list(TABLE)
    assert {name: row.family for name, row in TABLE.items()} == {n: e.family for n, e in ENTRIES.items()}
    assert {row.cpu for row in TABLE.values()} == {"tested"}


@for_each("name", SOMEWHERE)
def test_a_row_says_on_which_side_the_algorithm_is(name: str) -> None:
    row = TABLE[name]
    on_device = not any(why(level, "nccl") for level in levels(name))
    assert (row.nccl in (RUN, EMULATED)) == on_device, row
    assert (row.nccl.startswith("on the host, as ") and row.nccl.endswith(REFUSED)) != on_device, row
    assert all(why(level, "gloo") for level in levels(name))


@for_each("name", SOMEWHERE)
def test_attach_puts_it_there_and_refuses_what_cannot_be(name: str) -> None:
    on_device = TABLE[name].nccl in (RUN, EMULATED)
    cpu: Any = SimpleNamespace(_device_types=())
    with emulated_device():
        for level in levels(name):
            given = level, NAMED, fitting(level.compressor, NAMED), cpu
            assert placed(*given, None).in_stream == on_device
            if name in LAYERWISE:
                with pytest.raises(AttachError, match="in stream order, and that is not possible"):
                    placed(*given, HOST)
            else:
                assert not placed(*given, HOST).in_stream
            if on_device:
                assert placed(*given, "device").in_stream
            else:
                with pytest.raises(AttachError, match="exchange_on='device' is not possible"):
                    placed(*given, "device")


@for_each("name", [name for name, row in TABLE.items() if REFUSED in row.nccl])
def test_a_reason_names_a_part_that_needs_the_host(name: str) -> None:
    parts = {each for level in levels(name) for each in away(level)}
    assert TABLE[name].named, "no part is named"
    assert TABLE[name].named <= parts


@for_each("name", SOMEWHERE)
def test_what_was_run_is_what_tests_on_a_gpu_run(name: str) -> None:
    row = TABLE[name]
    assert (row.nccl == RUN) == (name in IN_STREAM or name == CHOSEN)
    assert row.host in (RUN, NOT_RUN, AT_ATTACH)
    assert (row.host == RUN) == (name in IN_STREAM | ON_HOST)


def test_the_number_of_algorithms_of_two_ranks_is_right() -> None:
    count = len(assigned("gpu_ranks.py", "ALGORITHMS"))
    assert f"share the GPU*, with {count} algorithms" in (ROOT / "docs" / "gpus.md").read_text()
