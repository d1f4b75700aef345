"""The guide to writing a compressor, followed word for word: the page's code is one file."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from laws import Peers, tensors

from tacit.compressors import ErrorFeedback
from tacit.testing import check_compressor
from tacit.topologies import Flat

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_whole_method_is_the_example() -> None:
    assert blocks()[0] == (PAGE.parents[1] / "examples" / "my_rows.py").read_text()


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module of the page's compressor, without the training that follows the class."""
    block = next(each for each in blocks() if "class OneScale" in each)
    code = block[: re.search(r"^\w+ = tacit\.Strategy\(", block, re.MULTILINE).start()]  # type: ignore[union-attr]
    file = tmp_path_factory.mktemp("guide") / "my_codecs.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("my_codecs", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_obeys_under_every_topology_and_a_server(guide: Any) -> None:
    checked = check_compressor(ErrorFeedback(guide.OneScale()))
    kinds = {text.partition("(")[0] for text in checked.accepted}
    assert kinds == {"Flat", "TwoPhase", "Auto", "Hierarchical", "Star"}
    assert not checked.refused


def test_one_row_says_its_bytes(guide: Any) -> None:
    group = Peers(guide.OneScale(), 4, 1000, Flat())
    group.exchange(tensors(4, 1000))
    assert group.net.sent == [3 * (1000 + 4)] * 4


def test_it_is_as_near_as_the_page_says(guide: Any) -> None:
    xs = tensors(3, 1000)
    mean = Peers(guide.OneScale(), 3, 1000, Flat()).exchange(xs)[0].mean
    error = (mean - torch.stack(xs).mean(0)).abs().max()
    assert float(error) <= max(float(x.abs().max()) for x in xs) / 254 + 1e-6
