"""What a member counts as useful of what it has trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tacit.environment import NODE
from tacit_lab.recipes.members import _Teller


def test_samples_that_the_state_of_others_has_replaced_are_not_useful(monkeypatch, capsys):
    monkeypatch.setenv(NODE, "0")
    session: Any = SimpleNamespace(
        session=SimpleNamespace(round=0), members=SimpleNamespace(number=1, size=2), step=0, metrics=dict
    )
    member = _Teller(session, parameters=1, steps=10)
    loss = torch.tensor(1.0)

    def useful() -> int:
        member.say()
        return member._useful

    member.stepped(16, loss, taken=False)
    assert useful() == 0  # its round is not finished
    session.session.round = 1
    member.stepped(16, loss, taken=False)
    assert useful() == 32
    member.stepped(16, loss, taken=False)
    session.session.round = 2
    member.stepped(16, loss, taken=True)  # both since round 1 are gone
    assert useful() == 32
    session.session.round = 3
    member.stepped(16, loss, taken=False)
    assert useful() == 48
    member.stepped(16, loss, taken=False)
    member.ended(0.5, 0.9)
    assert '"samples": 96, "useful": 64' in capsys.readouterr().out
