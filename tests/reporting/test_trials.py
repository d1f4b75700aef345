"""What a script reports to `tacit compare`, and that it costs nothing elsewhere."""

import json
from typing import Any

import pytest
import torch

import tacit
from tacit.errors import ConfigError


class Untouched:
    """A number that may not be looked at, as it would have a GPU waited for."""

    def __float__(self) -> float:
        raise AssertionError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_TRIAL", json.dumps({"seed": 3, "rate": 0.5}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TACIT_INTERFACE", raising=False)


def printed(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    marks = [line.partition("@tacit-trial ") for line in capfd.readouterr().out.splitlines()]
    return [json.loads(text) for _, mark, text in marks if mark]


def test_elsewhere_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TACIT_TRIAL", raising=False)
    tacit.report(3, loss=Untouched(), accuracy=Untouched())  # type: ignore[arg-type]
    assert tacit.trial() == (0, 1.0, None)
    assert capfd.readouterr().out == ""


def test_a_comparison_is_told(asked: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert tacit.trial() == (3, 0.5, None)
    tacit.report(7, loss=torch.tensor(0.25), accuracy=0.5, validation=torch.ones(1, 1))
    first, second = printed(capfd)
    assert (first["kind"], first["rank"], first["sent"]) == ("asked", 1, None)
    assert second["step"] == 7
    assert second["numbers"] == {"loss": 0.25, "accuracy": 0.5, "validation": 1.0}
    assert second["at"] >= first["at"] > 1e9


@pytest.mark.parametrize(
    ("step", "numbers", "message"),
    [
        (-1, {"loss": 1.0}, "step=-1: write how many steps"),
        (True, {"loss": 1.0}, "step=True: write how many steps"),
        (1.5, {"loss": 1.0}, "step=1.5: write how many steps"),
        (1, {}, "without a number: write loss=, accuracy= or both"),
        (1, {"accuracy": 97.5}, "accuracy=97.5: write a share from 0 to 1"),
        (1, {"loss": "low"}, "loss='low': write a number"),
        (1, {"loss": torch.zeros(2)}, "loss=tensor.*: write a number"),
    ],
)
def test_what_cannot_be_is_refused(asked: None, step: Any, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tacit.report(step, **numbers)
