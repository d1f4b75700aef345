import json
from contextlib import closing
from pathlib import Path

import pytest
from sample_records import HEAD

from cases import for_each
from tacit.errors import ConfigError
from tacit.files import Log
from tacit_lab import records

EPOCH = records.EpochRecord(
    algorithm="ddp", epoch=1, step=22, seconds=1.5, loss=0.25, accuracy=0.9, bytes_between_nodes=None
)
END = records.EndRecord(
    algorithm="ddp", status="ok", seconds=1.5, steps=22, metrics={"rounds": 3, "by": {"net": 1.0}}
)


@pytest.mark.parametrize("record", [HEAD, EPOCH, END], ids=lambda record: record.kind)
def test_a_record_survives_the_way_to_json_and_back(record: records.Record) -> None:
    line = record.to_json()
    assert "\n" not in line
    assert records.parse(line) == record
    assert type(record).from_json(line) == record


def test_a_file_holds_what_was_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with closing(Log(path)) as log:
        log.write(HEAD.to_json())
        assert list(records.read(path)) == [HEAD]  # flushed at once
        log.write(EPOCH.to_json())
    with closing(Log(path)) as log:
        log.write(END.to_json())
    assert list(records.read(path)) == [HEAD, EPOCH, END]


def test_a_newer_version_is_refused() -> None:
    line = EPOCH.to_json().replace('"version": 1', '"version": 99')
    with pytest.raises(ConfigError, match=r"version 99.*reads up to 1.*update tacit"):
        records.parse(line)


@for_each(
    ("line", "message"),
    [
        (EPOCH.to_json()[:40], "not a record"),
        ("[1, 2]", "no kind and version"),
        ('{"kind": "epoch"}', "no kind and version"),
        ('{"kind": "epok", "version": 1}', "unknown kind of record 'epok'. Did you mean 'epoch'"),
        ('{"kind": "end", "version": 1}', "lacks a field.*algorithm"),
        (
            END.to_json().replace('"steps"', '"stepz"'),
            "unknown field of EndRecord 'stepz'. Did you mean 'steps'",
        ),
        ('{"kind": [], "version": 1}', "no kind and version"),
        ('{"kind": "end", "version": 1, "loss": NaN}', "NaN is no number in JSON: write null"),
        ('{"kind": "end", "version": ' + 5000 * "1" + "}", "not a record: Exceeds the limit"),
        ('{"kind": "run", "version": 1, "algorithm": "ddp"}', "nothing about its environment"),
        ("[" * 100_000, "brackets within brackets"),
        (HEAD.to_json().replace('"world_size": ', '"world_size": -'), "world_size is -.*: write 1 or more"),
        (EPOCH.to_json().replace('"seconds": ', '"seconds": -'), "seconds is -.*: write 0 or more"),
        (EPOCH.to_json().replace('"accuracy": ', '"accuracy": 9'), "accuracy is 9.*a number from 0 to 1"),
        (
            '{"kind": "end", "version": 1, "algorithm": "ddp", "status": "ok", "metrics": {"servers": [1]}}',
            r"servers is \[1\] in the metrics of this EndRecord: write a list of objects with server, pushes",
        ),
    ],
)
def test_a_broken_line_is_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        records.parse(line)


@for_each(
    ("record", "field", "value", "message"),
    [
        (EPOCH, "seconds", '"fast"', "seconds is 'fast' in this EpochRecord: write a finite number"),
        (EPOCH, "step", "null", "step is None in this EpochRecord: write a whole number"),
        (EPOCH, "accuracy", "1e400", "accuracy is inf in this EpochRecord: write a finite number"),
        (EPOCH, "step", "1.5", "step is 1.5 in this EpochRecord: write a whole number"),
        (EPOCH, "step", "true", "step is True in this EpochRecord: write a whole number"),
        (EPOCH, "algorithm", "3", "algorithm is 3 in this EpochRecord: write a text"),
        (END, "status", '"fine"', "status is 'fine'.*write 'ok' or 'failed' or 'interrupted'"),
        (END, "status", "[]", "status is .*write 'ok' or"),
        (END, "loss", "{}", "loss is {} in this EndRecord: write a finite number or null"),
        (END, "traffic", "[[0, 1]]", "traffic is .* in this EndRecord: write as many rows as nodes"),
        (END, "traffic", "[[0, 1], [-1, 0]]", "traffic is .* in this EndRecord: write as many rows as nodes"),
        (END, "traffic", "{}", "traffic is {} in this EndRecord: write a list or null"),
        (END, "metrics", "[1]", "metrics is .* in this EndRecord: write an object"),
        (HEAD, "shaped", "1", "shaped is 1 in this RunRecord: write true or false"),
        (HEAD, "environment", "null", "says nothing about its environment"),
        (HEAD, "cores", '"two"', "cores is 'two' in this Environment: write a whole number"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(
    record: records.Record, field: str, value: str, message: str
) -> None:
    values = json.loads(record.to_json())
    (values if field in values else values["environment"])[field] = "here"
    line = json.dumps(values).replace('"here"', value)
    with pytest.raises(ConfigError, match=message):
        records.parse(line)


def test_a_whole_number_will_do_for_any_number() -> None:
    assert records.EpochRecord.from_json(EPOCH.to_json().replace("1.5", "2")).seconds == 2


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind 'end', not 'epoch'"):
        records.EpochRecord.from_json(END.to_json())


def test_reading_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{EPOCH.to_json()}\n{END.to_json()[:30]}")
    with pytest.raises(ConfigError, match=r"records\.jsonl, line 2: not a record"):
        list(records.read(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(records.read(tmp_path / "absent"))


def test_a_log_drops_a_line_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{EPOCH.to_json()}\n{END.to_json()[:30]}")
    with closing(Log(path)) as log:
        log.write(END.to_json())
    assert list(records.read(path)) == [EPOCH, END]


def test_a_log_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        Log(tmp_path / "file" / "records.jsonl")


def test_numbers_that_are_not_finite_become_null() -> None:
    record = records.EndRecord(
        algorithm="ddp", status="ok", loss=float("nan"), metrics={"a": [float("inf"), 1.0]}
    )
    again = records.EndRecord.from_json(record.to_json())
    assert again.loss is None
    assert again.metrics == {"a": [None, 1.0]}


def test_the_environment_is_this_machine() -> None:
    here = records.Environment.here()
    assert here.cores >= 1
    assert here.cpu
    assert here.torch[0].isdigit()
    assert here.tacit[0].isdigit()
