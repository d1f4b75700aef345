"""Whether recorded trainings are still of today's algorithms."""

from dataclasses import replace
from pathlib import Path

import pytest

import accuracy
import fingerprints
from tacit_lab.study.jobs import Ended, StudyRun

JOB = StudyRun("digits", "topk", 22, seed=0, rate=1.0)
THEN = Ended(JOB, accuracy=0.9, validation=0.9, loss=0.5, share=0.03, seconds=1.0, hardware={})


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fingerprints, "FILE", tmp_path / "fingerprints.json")
    return tmp_path


@pytest.mark.parametrize("arm", ["lowbit:bits=2,sync_every=2", "zeroone-adam"])
def test_an_algorithm_has_its_own_fingerprint(arm: str) -> None:
    loss, share = found = fingerprints.fingerprint(arm)
    assert fingerprints.same(found, (1.01 * loss, share))
    assert not fingerprints.same(found, (loss, 1.01 * share))
    assert not fingerprints.same(found, (1.05 * loss, share))
    assert not fingerprints.same(found, fingerprints.fingerprint("signsgd"))


def test_records_stand_while_the_fingerprint_is_the_noted_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fingerprints.standing("topk", fingerprints.noted()) is None
    monkeypatch.setattr(fingerprints, "fingerprint", lambda arm: (0.5, 0.03))
    fingerprints.note("topk", JOB)
    assert fingerprints.standing("topk", fingerprints.noted())
    monkeypatch.setattr(fingerprints, "fingerprint", lambda arm: (0.6, 0.03))
    assert fingerprints.standing("topk", fingerprints.noted()) is False


@pytest.mark.parametrize(
    ("now", "stands"),
    [
        (THEN, True),
        (replace(THEN, accuracy=0.893), True),
        (replace(THEN, accuracy=0.88), False),
        (replace(THEN, share=0.031), False),
    ],
)
def test_one_training_made_again_shows_it_for_an_arm(
    kept: Path, monkeypatch: pytest.MonkeyPatch, now: Ended, stands: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    dearer = replace(THEN, job=replace(JOB, seed=1), seconds=9.0)
    done = {each.job: each for each in (dearer, THEN)}
    monkeypatch.setattr(fingerprints, "fingerprint", lambda arm: (0.5, 0.03))

    def at_once(missing, train, keep, fail, **_):  # type: ignore[no-untyped-def]
        (job,) = missing()
        assert job == JOB, "the cheapest"
        keep(job, now)

    monkeypatch.setattr(accuracy, "train_at_once", at_once)
    monkeypatch.setattr("sys.argv", ["accuracy.py", "--again"])
    row = {"task": "digits", "arm": "topk", "steps": 22, "rate": 1.0, "gap": {"half": 0.004}}
    accuracy.again(done, [{**row, "rate": 2.0}, row, {**row, "arm": "dense"}], accuracy.parsed())
    assert ("stands" if stands else "is STALE") in capsys.readouterr().out
    assert list(fingerprints.noted()) == (["topk"] if stands else [])


def test_the_page_marks_what_the_noted_fingerprints_say() -> None:
    """For the algorithm that the README speaks of; `accuracy.py --table --publish` looks at all."""
    page = (Path(__file__).parents[2] / "docs" / "accuracy-tables.md").read_text()
    arm = "lowbit:bits=2,sync_every=3,entropy=true"
    marked = f"| `{arm}` † |" in page
    assert marked == (not fingerprints.standing(arm, fingerprints.noted()))
