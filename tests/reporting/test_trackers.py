"""Numbers of a session in trackers of experiments: the real packages, without a network."""

import json
import struct
import time
from pathlib import Path

import mlflow
import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger
from wandb.proto import wandb_internal_pb2

import tacit

BLOCK, FULL, LAST = 1 << 15, 1, 4
"""Of LevelDB's logs: the bytes of a block, and the kinds of pieces that end a record."""


class Session:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def metrics(self) -> dict[str, float]:
        return {"rounds": self.rounds, "compute_share": 0.75}


def test_wandb_keeps_the_numbers_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="tacit") as run:
        tacit.log_metrics(run, Session(3), 7)
        run.log({"loss": 0.5}, step=7)
        tacit.log_metrics(run, Session(4), 8, prefix="far")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 30
    while len(history(file)) < 2 and time.monotonic() < until:
        time.sleep(0.1)  # its own process writes on behind the end of the run
    rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in history(file)]
    assert rows == [
        {"tacit/rounds": 3, "tacit/compute_share": 0.75, "loss": 0.5},
        {"far/rounds": 4, "far/compute_share": 0.75},
    ]


def history(file: Path) -> list[dict[str, float]]:
    """The rows that an offline run has kept, in a log of LevelDB's format: records cut at 32 KiB."""
    content, rows, whole, at = file.read_bytes(), [], b"", 7  # behind its own header
    while at + 7 <= len(content):
        if at % BLOCK > BLOCK - 7:  # no room for a header
            at += BLOCK - at % BLOCK
        size, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def test_mlflow_keeps_the_numbers_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its data base needs packages that tests do not
    mlflow.set_tracking_uri(tmp_path.as_uri())
    with mlflow.start_run(experiment_id=mlflow.create_experiment("tacit")) as run:
        tacit.log_metrics(mlflow, Session(3), 7)
        tacit.log_metrics(mlflow, Session(4), 8)
    kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "tacit/rounds")
    assert [(each.step, each.value) for each in kept] == [(7, 3.0), (8, 4.0)]


def test_a_logger_of_lightning_keeps_them(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="run")
    tacit.log_metrics(logger, Session(3), 7)
    logger.save()
    (file,) = tmp_path.rglob("metrics.csv")
    header, row = file.read_text().splitlines()
    assert dict(zip(header.split(","), map(float, row.split(",")), strict=True)) == {
        "step": 7,
        "tacit/rounds": 3,
        "tacit/compute_share": 0.75,
    }


def test_what_is_no_tracker_is_named() -> None:
    with pytest.raises(tacit.ConfigError, match=r"cannot write to int: give a tracker with add_scalar"):
        tacit.log_metrics(3, Session(3), 7)  # type: ignore[arg-type]
