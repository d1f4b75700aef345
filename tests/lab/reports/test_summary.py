import io
from dataclasses import replace

import pytest
from rich.console import Console
from sample_records import ALONE, DDP, HEAD, TOPK, WHOLE, comparison

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit_lab import records, reports
from tacit_lab.reports import summary


def headline(*ends: records.EndRecord, head: records.RunRecord = HEAD) -> str:
    return summary.headline(reports.compare(comparison(*ends, head=head)))


def test_the_headline_says_how_the_best_did_against_ddp() -> None:
    assert headline(DDP, TOPK, ALONE) == (
        "topk:ratio=0.01 trained 6.0x as fast as ddp over 100 Mbit/s links and sent 95.0 % less, "
        "at 0.972 against 0.980 accuracy."
    )


def test_the_fastest_of_those_that_reached_the_target_is_the_best() -> None:
    faster = replace(TOPK, algorithm="fast", seconds=1.0, seconds_to_target=None)
    assert headline(DDP, TOPK, faster).startswith("topk:ratio=0.01 trained 6.0x")
    assert headline(DDP, faster).endswith("accuracy; it did not reach the target accuracy 0.95.")
    late = replace(DDP, seconds_to_target=None)
    assert headline(late, faster).endswith("; neither reached the target accuracy 0.95.")


def test_that_nothing_was_gained_is_an_answer() -> None:
    slower = replace(TOPK, seconds=75.0, mb_between_nodes=1100.0)
    assert headline(DDP, slower).startswith(
        "Nothing trained faster than ddp: topk:ratio=0.01 took 1.25x as long as ddp over 100 Mbit/s links "
        "and sent 10.0 % more"
    )
    assert "trained 1.03x as fast as ddp" in headline(DDP, replace(TOPK, seconds=58.0))


def test_what_is_unknown_is_left_out_of_the_headline() -> None:
    bare = replace(TOPK, mb_between_nodes=None, accuracy=None, loss=None)
    assert headline(DDP, bare) == "topk:ratio=0.01 trained 6.0x as fast as ddp over 100 Mbit/s links."


def test_without_a_shaped_network_the_headline_says_so() -> None:
    head = replace(HEAD, cluster="local:4", shaped=False)
    assert "as fast as ddp on local:4 (no network was shaped)" in headline(DDP, TOPK, head=head)


def test_of_replicas_in_one_process_bytes_and_accuracy_are_told() -> None:
    head = replace(HEAD, cluster="4x1", shaped=False, in_process=True)
    ddp, topk = (
        replace(each, seconds=None, mb_between_nodes=None, mb_by_count=each.mb_between_nodes)
        for each in (DDP, TOPK)
    )
    assert headline(ddp, topk, head=head) == (
        "topk:ratio=0.01 sent 95.0 % less than ddp, at 0.972 against 0.980 accuracy, with all replicas in "
        "one process."
    )
    for alone in ((ddp,), (replace(ddp, mb_by_count=0.0), topk)):
        assert headline(*alone, head=head) == "ddp reached 0.980 accuracy, with all replicas in one process."


def test_one_algorithm_and_none() -> None:
    assert headline(DDP) == (
        "ddp trained in 60.0 s over 100 Mbit/s links and sent 1000.0 MB, at 0.980 accuracy."
    )
    failed = records.EndRecord(algorithm="ddp", status="failed")
    assert headline(failed) == "No algorithm finished over 100 Mbit/s links."


def test_a_failed_base_leaves_the_others_to_be_told() -> None:
    failed = records.EndRecord(algorithm="ddp", status="failed")
    assert headline(failed, TOPK).startswith("topk:ratio=0.01 trained in 10.0 s")


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("2x2@1gbit", "1 Gbit/s links"),
        ("4x1@2.5gbit,20ms", "2.5 Gbit/s links with 20 ms of latency"),
        ("2x1@500kbit", "500 kbit/s links"),
        (
            "2x1@1gbit,5ms±1ms,0.1%loss,mtu=1280",
            "1 Gbit/s links with 5 ms of latency, ± 1 ms, 0.1 % of packets lost, an MTU of 1,280 bytes",
        ),
        (
            "nodes=[1@1gbit,1@1gbit,1%loss]",
            "1 Gbit/s links, whose loss, jitter, MTU or NAT differs",
        ),
        ("2x2", "full-speed links"),
        ("what?", "what?"),
        ("4x1@1gbit+load=50mbit", "1 Gbit/s links, each with a background load of 50 Mbit/s"),
        (
            "nodes=[1@1gbit,1@100mbit,5ms+load=20mbit]",
            "uneven 100 Mbit/s to 1 Gbit/s links with 0 to 5 ms of latency, with background loads of "
            "0 kbit/s to 20 Mbit/s",
        ),
    ],
)
def test_links_in_words(cluster: str, words: str) -> None:
    assert summary.links(cluster) == words


def test_a_whole_comparison_needs_no_notice() -> None:
    assert summary.notices(reports.compare(WHOLE), WHOLE) == []


def test_what_auto_went_on_with_is_told_with_its_reason() -> None:
    choice = {"algorithm": "bf16", "reason": "bf16: it halves the bytes", "seconds": 0.1, "considered": []}
    auto = replace(TOPK, algorithm="auto", metrics={"choice": choice})
    whole = [*WHOLE, auto]
    assert records.parse(auto.to_json()) == auto
    assert summary.news(whole) == ["auto went on with bf16: it halves the bytes"]
    assert summary.notices(reports.compare(whole), whole) == []
    console = Console(width=80, file=io.StringIO())
    console.print(reports.table(reports.compare(whole)))
    assert "auto went on with bf16" in console.file.getvalue()  # type: ignore[attr-defined]
    broken = replace(auto, metrics={"choice": {"algorithm": 3}})
    with pytest.raises(ConfigError, match=r"choice is .*write an object with algorithm and reason"):
        records.parse(broken.to_json())


def test_failures_and_what_is_missing_are_noticed() -> None:
    failed = replace(TOPK, status="failed", error="topk:ratio=0.01 failed: rank 1 was killed")
    head = replace(HEAD, shaped=False)
    found = comparison(replace(DDP, mb_between_nodes=None), failed, head=head)
    told = "\n".join(summary.notices(reports.compare(found), found))
    assert told.startswith("topk:ratio=0.01 failed: rank 1 was killed\nNo network was shaped")
    assert "No bytes were counted" in told
    assert "no finished compute-only run" in told


def test_a_run_without_an_end_is_seen() -> None:
    *_, end = summary.close_open_runs(WHOLE[:-1])
    assert isinstance(end, records.EndRecord)
    assert (end.algorithm, end.status, end.error) == ("compute-only", "interrupted", summary.UNFINISHED)
    assert summary.close_open_runs(WHOLE) == WHOLE


def begun(
    algorithm: str, seed: int, weights: float, loss: float = 0.1, steps: int = 9
) -> list[records.Record]:
    """A run of a script."""
    head = replace(HEAD, algorithm=algorithm, seed=seed, weights=weights, epochs=None)
    return [head, replace(DDP, algorithm=algorithm, seed=seed, loss=loss, steps=steps)]


def test_nothing_speaks_against_runs_that_differ_as_they_should() -> None:
    found = [each for seed in range(3) for name in ("ddp", "topk") for each in begun(name, seed, 1.0 + seed)]
    assert summary.doubts(found) == []


def test_two_seeds_are_few() -> None:
    (told,) = summary.doubts([*begun("ddp", 0, 1.0), *begun("ddp", 1, 2.0)])
    assert told.startswith("Two seeds: an interval of two pairs says next to nothing")


def test_steps_of_the_rates_own_size_are_told_where_they_missed_the_target() -> None:
    def told(algorithm: str, accuracy: float, rate: float = 1.0) -> list[str]:
        ends = DDP, replace(TOPK, algorithm=algorithm, accuracy=accuracy, rate=rate), ALONE
        return [each for each in summary.doubts(comparison(*ends)) if "--rates 0.5,1,2" in each]

    (only,) = told("demo:k=64", 0.17)
    assert only.startswith("demo:k=64 missed the target at a learning rate that is made for gradients")
    assert told("demo", 0.96) == told("demo", 0.17, rate=1 / 128) == told("topk", 0.17) == []


def test_what_closing_sends_is_told_where_it_is_much() -> None:
    records_ = begun("lowbit", 0, 1.0)
    point = records.EpochRecord(
        algorithm="lowbit",
        epoch=1,
        step=9,
        seconds=1.0,
        loss=0.1,
        accuracy=0.9,
        bytes_between_nodes=700_000_000,
    )
    (told,) = summary.doubts([records_[0], point, records_[1]])
    assert told.startswith("Of the 1000.0 MB of lowbit, 300.0 were sent behind the last report: closing")
    assert summary.doubts([records_[0], replace(point, bytes_between_nodes=990_000_000), records_[1]]) == []
    alone = [replace(each, algorithm=records.COMPUTE_ONLY) for each in (records_[0], point, records_[1])]
    assert summary.doubts(alone) == []


def test_a_run_without_a_round_is_doubted() -> None:
    def told(strategy: str, steps: int) -> list[str]:
        head, end = begun("diloco", 0, 1.0, steps=steps)
        assert isinstance(head, records.RunRecord)
        return summary.doubts([replace(head, strategy=strategy), end])

    (only,) = told(str(parse("diloco")), 22)
    assert only.startswith(
        "diloco exchanges every 32 steps, and its run had 22: it made no round but that of"
    )
    assert told(str(parse("diloco")), 32) == told(str(parse("topk")), 1) == []
    assert told(str(parse("streaming-diloco:sync_every=40,fragments=2")), 22) == []


def test_what_is_faster_than_nothing_to_send_is_doubted() -> None:
    assert ALONE.seconds == 3.0
    assert summary.doubts(comparison(DDP, replace(TOPK, seconds=2.999), ALONE)) == []
    (told,) = summary.doubts(comparison(DDP, replace(TOPK, seconds=2.95), ALONE))
    assert told.startswith("topk:ratio=0.01 took less time than training without communication")


def test_the_headline_is_not_of_what_loses() -> None:
    fast = replace(TOPK, algorithm="fast", seconds=5.0)
    found: list[records.Record] = []
    for seed, lost in enumerate((0.10, 0.11, 0.12)):
        ends = comparison(DDP, TOPK, replace(fast, accuracy=0.98 - lost))
        found += [replace(each, seed=seed) for each in ends]
    same = [
        replace(each, accuracy=0.98)
        if isinstance(each, records.EndRecord) and each.algorithm == TOPK.algorithm
        else each
        for each in found
    ]
    assert summary.headline(reports.compare(same)).startswith("topk:ratio=0.01 trained 6.0x")


def test_other_weights_with_one_seed_are_told() -> None:
    (told,) = summary.doubts([*begun("ddp", 0, 1.0), *begun("topk", 0, 1.5)])
    assert told.startswith("With seed 0, ddp and topk began with different weights: seed the script")


def test_seeds_that_change_nothing_are_told_and_a_base_that_is_loaded_is_not() -> None:
    three = [each for seed in range(3) for each in begun("ddp", seed, 1.0)]
    (told,) = summary.doubts(three)
    assert "equal loss with the seeds 0 and 1" in told
    losses = [each for seed in range(3) for each in begun("ddp", seed, 1.0, loss=0.1 * (seed + 1))]
    assert summary.doubts(losses) == []


def test_runs_of_other_lengths_are_told() -> None:
    (told,) = summary.doubts([*begun("ddp", 0, 1.0), *begun("topk", 0, 1.0, steps=4)])
    assert told == "The algorithms did not take the same number of steps: ddp 9, topk 4."


def test_runs_do_not_count_whose_relay_did_not_keep_up() -> None:
    busy = replace(TOPK, relay_cores=0.9, relay_doubt="took 0.90 of a processor core in its busiest second")
    found = comparison(replace(DDP, relay_cores=0.2), busy)
    assert summary.doubts(found)[0] == (
        "topk:ratio=0.01 does not count: the relay, a process that makes packets late here, took 0.90 of a "
        "processor core in its busiest second."
    )
    assert "at most 0.90 of a core in any second" in reports.page(found)
    assert "relay of the links" not in reports.page(WHOLE)


def test_churn_that_came_to_nobody_is_told() -> None:
    head, end = (
        replace(HEAD, algorithm="lowbit under churn", churn=20.0),
        replace(TOPK, algorithm="lowbit under churn"),
    )
    churn = records.ChurnRecord(
        algorithm=end.algorithm, went=[], members=[[0.0, 4]], rounds=[], samples=[], useful=100, up=9.0
    )
    (told,) = summary.doubts([head, churn, end])
    assert told == (
        "Nothing happened to a replica in lowbit under churn: it took 10.0 s, and one goes every 20 s. "
        "Write more --epochs, or a shorter --churn."
    )
    assert summary.doubts([head, replace(churn, went=[[5.0, 1, "killed"]]), end]) == []


def test_replicas_that_come_and_go_are_compared_with_each_other() -> None:
    lowbit, diloco = (replace(TOPK, algorithm=f"{name} under churn") for name in ("lowbit", "diloco"))
    ends = (lowbit, replace(diloco, seconds=5.0))
    said = "diloco under churn trained 2.0x as fast as lowbit under churn over 100 Mbit/s links"
    assert headline(DDP, TOPK, *ends).startswith(said)
    assert headline(*ends).startswith(said)
    churn = [
        records.ChurnRecord(
            algorithm=end.algorithm, went=went, members=[], rounds=[], samples=[], useful=9, up=9.0
        )
        for end, went in zip(ends, ([[1.0, 2, "killed"], [3.0, 2, "back"]], []), strict=True)
    ]
    found = reports.compare([HEAD, DDP, *churn, *ends])
    assert [row.faults for row in found.rows] == [None, 1, 0]
    assert summary.headline(found).startswith("lowbit under churn trained in 10.0 s")
    calm = replace(lowbit, algorithm="dense under churn", seconds=40.0)
    churn = [replace(each, went=[[1.0, 2, "killed"]]) for each in churn]
    assert summary.headline(reports.compare([HEAD, calm, *churn, *ends])).startswith(said)
    assert summary.notices(reports.compare([HEAD, *ends]), [HEAD, *ends]) == []
    assert "no finished compute-only" in str(summary.notices(reports.compare([HEAD, DDP, *ends]), []))
