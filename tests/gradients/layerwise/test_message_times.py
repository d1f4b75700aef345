"""When planned messages were ready, left and came."""

from dataclasses import dataclass, field
from threading import Event, Timer

import torch
from torch import Tensor

from tacit.gradients.layerwise.message_plan import MessagePlan
from tacit.gradients.layerwise.message_times import MessageLog

PLAN = MessagePlan((("head.bias", "head.weight"), ("body.weight",)))


@dataclass(eq=False)
class Sent:
    flat: Tensor = field(default_factory=lambda: torch.zeros(5))


def told(log: MessageLog, step: int, messages: list[Sent]) -> None:
    """A round of two messages, the second of which leaves first."""
    log.next_round(step, messages, PLAN)
    for do in (log.ready, log.left, log.came):
        for each in messages:
            do(each)


def test_nothing_is_noted_before_it_is_asked_for() -> None:
    log = MessageLog()
    told(log, 0, [Sent(), Sent()])
    assert log.messages() == []
    log.begin()
    told(log, 1, [Sent(), Sent()])
    log.begin()
    assert [each.step for each in log.messages()] == [1, 1]


def test_messages_are_in_the_order_in_which_the_next_forward_pass_needs_them() -> None:
    log = MessageLog()
    log.begin()
    told(log, 0, [Sent(), Sent()])
    assert [(each.turn, each.name, each.bytes) for each in log.messages()] == [
        (0, "body.weight", 20),  # of backward's order it is the last
        (1, "head.weight and 1 more", 20),
    ]
    log.order_by({"head.bias": 0, "body.weight": 1, "head.weight": 2})
    assert [each.name for each in log.messages()] == ["head.bias and 1 more", "body.weight"]


def test_only_waits_that_took_time_are_noted_and_of_the_message_that_was_waited_for() -> None:
    log, messages, over = MessageLog(), [Sent(), Sent()], Event()
    log.begin()
    log.next_round(0, messages, PLAN)
    for each in messages:
        log.ready(each)
        log.left(each)

    def come() -> None:
        log.came(messages[0])
        over.set()

    Timer(0.05, come).start()
    log.wait_for(messages[0], over)
    log.wait_for(messages[0], over)
    assert [each.name for each in log.messages()] == ["head.weight and 1 more"]  # the other has not come
    (wait,) = log.messages()[0].waits
    assert wait.ended - wait.begun > 0.02
    assert log.messages()[0].left <= wait.begun <= log.messages()[0].came <= wait.ended


def test_waiting_without_a_log_is_waiting() -> None:
    over = Event()
    over.set()
    MessageLog().wait_for(Sent(), over)
