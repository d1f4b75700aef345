import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

import tacit
from tacit.reporting import scalars


class Session:
    def metrics(self) -> dict[str, float]:
        return {"rounds": 3, "compute_share": 0.75}


def test_all_numbers_are_written_by_step(
    tmp_path: Path, read_curves: Callable[[Path], dict[str, list[tuple[int, float]]]]
) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        tacit.log_metrics(writer, Session(), 7)
        tacit.log_metrics(writer, Session(), 8, prefix="far")
    assert read_curves(tmp_path) == {
        "far/compute_share": [(8, 0.75)],
        "far/rounds": [(8, 3.0)],
        "tacit/compute_share": [(7, 0.75)],
        "tacit/rounds": [(7, 3.0)],
    }


def test_the_writers_package_is_asked_for_when_a_writer_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # to import it would be another error
    with pytest.raises(tacit.ConfigError, match=r"pip install 'torch-tacit\[tensorboard\]'"):
        scalars.open_writer(tmp_path, "topk")


def test_a_run_has_one_folder_whatever_its_name(tmp_path: Path) -> None:
    scalars.open_writer(tmp_path, "near/far:ratio=0.1,rank=2").close()
    (folder,) = tmp_path.iterdir()
    assert folder.name == "near_far:ratio=0.1,rank=2"
    with pytest.raises(tacit.ConfigError, match="curves of another run"):
        scalars.check(tmp_path, ["ddp", "near/far:ratio=0.1,rank=2"])


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    for name in ("topk", "topk.2", "topk.3"):
        assert scalars.free(tmp_path, "topk") == name
        scalars.open_writer(tmp_path, name).close()
