"""What the benchmark of orders and neighbours makes of what its ranks have told."""

import pytest

import gossip_steps
import order
import scheduled_steps
import sliced_bytes


def scheduled(**ms: float) -> list[dict[str, object]]:
    """Rows of one model, where computing takes 100 ms, and DDP 200."""
    took = {"ddp": 200.0, "fusion": 150.0, "priority": 140.0} | ms
    return [
        {
            "model": "vgg11",
            "arm": arm,
            "ms": each,
            "busy_ms": each,
            "limit_ms": 100.0,
            "removed": (200 - each) / 100,
        }
        for arm, each in took.items()
    ]


def neighbours(last: float) -> list[dict[str, object]]:
    """A ring's step takes `last` ms on the most nodes, and 100 on the fewest."""
    return [
        {"how": how, "nodes": nodes, "arm": arm, "ms": last if nodes == counts[-1] else 100.0}
        for how, counts in (("testbed", gossip_steps.TESTBED), ("clock", gossip_steps.CLOCK))
        for nodes in counts
        for arm in gossip_steps.ARMS
    ]


def test_half_of_what_ddp_waits_is_promised() -> None:
    met = {each["what"]: each["met"] for each in scheduled_steps.verdicts(scheduled(priority=151.0))}
    assert met == {
        "vgg11, fusion: of DDP's waiting removed": True,
        "vgg11, priority: of DDP's waiting removed": False,
    }


def test_a_step_that_grows_by_more_than_a_tenth_is_missed_where_it_is_promised() -> None:
    assert {each["met"] for each in gossip_steps.verdicts(neighbours(105.0))} == {True, None}
    found = {each["what"]: each["met"] for each in gossip_steps.verdicts(neighbours(120.0))}
    assert found["sgp, 4 to 16 nodes, clock"] is False
    assert found["ddp, 4 to 16 nodes, clock"] is None


def test_more_than_the_gradient_out_of_a_node_is_missed() -> None:
    rows = [{"arm": "sliced", "megabytes": 4.2, "gradients": 1.5}]
    assert [each["met"] for each in sliced_bytes.verdicts(rows)] == [False]


def test_a_saved_result_is_shown_part_by_part() -> None:
    rows = {"scheduled": scheduled(), "gossip": neighbours(101.0)}
    text = order.table({"rows": rows})
    assert "| vgg11 | `fusion` | 150 | 150 | 50 % | 1.50 × |" in text
    assert "16 nodes, clock" in text


def test_a_part_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        order.main(["--only", "scheduled,gosip"])
    assert (
        "there is no part 'gosip': write some of scheduled, gossip, slices, uneven" in capsys.readouterr().err
    )
