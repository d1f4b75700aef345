"""What is checked on three processes: a number of ranks of which no tree is made without a rest."""

import threading
from collections.abc import Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gloo_checks import TABLE, agrees_with_the_loopback
from rank_training import Checks, close_to, flat, raises, same_on_all_ranks, sgd, steps, trained, wrapped
from torch import nn

import tacit
from tacit.contracts import AllGather, AllReduce, AllToAll, Collective, Permute, Posted, ReduceScatter
from tacit.errors import AttachError
from tacit.exchange.driver import drive
from tacit.transports.message_layout import AT_ONCE, IN_ROUNDS
from tacit.transports.torch_distributed import TorchTransport

CHECKS = Checks()
check = CHECKS.add


def opened(nodes: Sequence[Sequence[int]] = ()) -> TorchTransport:
    transport = TorchTransport(dist.group.WORLD, timedelta(seconds=30), nodes)
    transport.open({"world": 1})
    return transport


def asked(request: Collective) -> Generator[Collective, Any, Any]:
    """An exchange of one request."""
    return (yield request)


def answered(posted: Posted) -> Any:
    done = threading.Event()
    posted.on_done(done.set)
    assert done.wait(20)
    return posted.answer()


@check
def gloo_gives_the_numbers_of_the_loopback() -> None:
    agrees_with_the_loopback({name: row for name, row in TABLE.items() if row.topology == tacit.GlobalTopK()})


@check
def a_payload_reaches_the_one_it_is_for() -> None:
    rank = dist.get_rank()
    transport = opened()

    def sent(to: tuple[int | None, ...]) -> list[float] | None:
        # 5 bytes: what arrives does not lie aligned behind what leaves.
        payload = torch.tensor([float(rank)]), torch.tensor([rank], dtype=torch.uint8)

        answer = drive(asked(Permute(payload, to, "world")), transport)
        return None if answer is None else [float(tensor) for tensor in answer]

    for to, sources in (
        ((1, 0, None), (1, 0, None)),
        ((1, 2, 0), (2, 0, 1)),
        ((None, None, 1), (None, 2, None)),
        ((None, None, None), (None, None, None)),
    ):
        before = transport.sent
        source = sources[rank]
        assert sent(to) == (None if source is None else [source, source]), to
        assert transport.sent - before == (0 if to[rank] is None else 5)
    transport.close()


@check
def short_and_long_payloads_are_gathered_in_the_order_of_ranks() -> None:
    rank = dist.get_rank()
    transport = opened([[0], [1], [2]])

    def gathered(numel: int) -> list[list[torch.Tensor]]:
        # A byte more than fours: of three messages in a row only the first lies aligned.
        payload = torch.full((numel,), float(rank)), torch.tensor([rank], dtype=torch.uint8)
        return [[*each] for each in drive(asked(AllGather(payload, "world")), transport)]

    for numel in (0, 1, (AT_ONCE - 1) // 4, AT_ONCE // 4, AT_ONCE):
        before = transport.sent
        for peer, (many, one) in enumerate(gathered(numel)):
            assert torch.equal(many, torch.full((numel,), float(peer))), (numel, peer)
            assert one.tolist() == [peer], (numel, peer)
        assert transport.sent - before == 2 * (4 * numel + 1)
    transport.close()


@check
def small_and_large_messages_of_all_to_all_reach_those_they_are_for() -> None:
    """Several exchanges at once, on one group; a rank may be sent more than the others, or nothing."""
    rank = dist.get_rank()
    transport = opened()
    fair = IN_ROUNDS // 4
    lengths = [
        (fair, fair, fair),
        (fair, fair + 1, fair),
        (3 * fair + 1, 0, 0),
        (0, 2 * fair, 2 * fair),
        (0, 0, 0),
    ]

    def number(sender: int, receiver: int) -> float:
        return float(10 * sender + receiver)

    requests = [
        AllToAll(tuple((torch.full((n,), number(rank, to)),) for to, n in enumerate(each)), "world")
        for each in lengths
    ]
    posted = [transport.post(request, 0, f"{i}") for i, request in enumerate(requests)]
    for each, lengths_ in zip(posted, lengths, strict=True):
        for sender, (arrived,) in enumerate(answered(each)):
            assert torch.equal(arrived, torch.full((lengths_[rank],), number(sender, rank))), (
                lengths_,
                sender,
            )
    transport.close()


@check
def small_and_large_tensors_are_added_up_by_slices() -> None:
    rank = dist.get_rank()
    transport = opened()
    for numel in (3, 3 * IN_ROUNDS // 4, 3 * IN_ROUNDS // 4 + 2):
        spans = ((0, numel // 2), (numel // 2, numel // 2), (numel // 2, numel))
        x = torch.arange(float(numel)) + rank
        drive(asked(ReduceScatter(x, spans, "world")), transport)
        start, stop = spans[rank]
        torch.testing.assert_close(x[start:stop], torch.arange(float(numel))[start:stop] + 1)
    transport.close()


@check
def axes_of_equal_ranks_may_speak_in_another_order_on_each() -> None:
    """As where all ranks are on one node: what is averaged in it, and what all of the world average."""
    rank = dist.get_rank()
    transport = TorchTransport(dist.group.WORLD, timedelta(seconds=5), nodes=[[0, 1, 2]])
    transport.open({"node": 1, "world": 1})
    asked = [
        AllReduce((torch.full((size,), float(rank)),), axis) for axis, size in (("node", 10), ("world", 1000))
    ]
    for _ in range(5):
        posted = {ask.axis: transport.post(ask, 0, ask.axis) for ask in (asked if rank else asked[::-1])}
        for ask in asked:
            (mean,) = answered(posted[ask.axis])
            assert bool((mean == 1.0).all()), ask.axis
            ask.payload[0].fill_(float(rank))
    transport.close()


@check
def gtopk_that_keeps_everything_is_ddp_and_learns_where_it_does_not() -> None:
    ddp, start = trained("ddp"), flat(wrapped())
    close_to(trained("gtopk:ratio=1.0"), ddp)
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "gtopk:ratio=0.1") as session:
        steps(model, optimizer, 10)
        sent = session.session.stats.records[-1].bytes_out
        assert sent == sum(sum(cost.sent.values()) for cost in session.session.store.costs)
    assert same_on_all_ranks(flat(model))
    assert float((flat(model) - ddp).norm()) < 0.75 * float((start - ddp).norm())


# ---- a step that is taken back --------------------------------------------------------------------------

DISCARDED = (
    *(
        "dense",
        "qsgd:bits=4",
        "randomk:ratio=0.1",
        "powersgd:rank=1",
        "lag:xi=0.01",
        "gtopk:ratio=0.1",
    ),
    *("topk:ratio=0.1,topology=two-phase", "dgc:ratio=0.1,warmup_steps=4"),
    *("fusion:megabytes=0.1", "onebit-adam:freeze_step=2,refresh=1", "zeroone-adam:freeze_step=2,refresh=1"),
    *("postlocal:start_step=4,sync_every=2", "adacomm:sync_every=2,interval=4"),
)
"""Not `ddp`: after the first backward DDP cuts other buckets, and adds up in another order."""
CLEARED = (
    "topk:ratio=0.1",
    "powersgd:rank=1",
    "dgc:ratio=0.1,warmup_steps=4",
    "int8",
    "efsign",
    "fusion:megabytes=0.1,compressor=int8",
)
"""With residuals, a batch whose gradients are cleared without a step leaves no trace either."""


def spiked(algorithm: str, way: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Parameters and the session's state, where a spike was never met, discarded, or cleared."""
    model = wrapped()
    optimizer: Any = torch.optim.Adam(model.parameters()) if "adam" in algorithm else sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        for step in range(6):
            optimizer.zero_grad()
            if step in (0, 3) and way:
                loss = model(1e3 * torch.randn(8, 20)).square().mean()
                if way == "discarded":
                    session.observe(loss)
                loss.backward()
                assert way == "cleared" or session.discard(dist.get_rank() == 1)
                optimizer.zero_grad()
            session.observe(float(step))
            steps(model, optimizer, 1, seed=step)
        if algorithm == "dense":
            assert session.metrics()["void_rounds"] == (2 if way else 0)
        return flat(model), session.state_dict()


@check
def a_discarded_step_leaves_no_trace() -> None:
    leave_no_trace(DISCARDED, "discarded")


@check
def gradients_that_are_cleared_leave_no_trace() -> None:
    leave_no_trace(CLEARED, "cleared")


def leave_no_trace(algorithms: tuple[str, ...], way: str) -> None:
    for algorithm in algorithms:
        with patch("tacit.gradients.accumulation_checks._log.warning") as warning:
            (wanted, kept), (found, has) = (spiked(algorithm, each) for each in ("", way))
        assert not any("without optimizer.step" in call.args[0] for call in warning.call_args_list), algorithm
        assert torch.equal(found, wanted), algorithm
        assert kept.keys() == has.keys(), algorithm
        differ = [
            key
            for key, value in kept.items()
            if not (torch.equal(value, has[key]) if isinstance(value, torch.Tensor) else value == has[key])
        ]
        assert not differ, (algorithm, differ)


@check
def a_step_is_discarded_in_its_time_or_an_error_says_so() -> None:
    def passed(model: nn.Module) -> None:
        model(torch.randn(8, 20)).sum().backward()

    early, rank = "no backward since", dist.get_rank()
    for algorithm in ("ddp", "topk:ratio=0.1", "localsgd:sync_every=2"):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm) as session:
            raises(AttachError, session.discard, early)
            passed(model)
            no_wish = "another rank has called it at a wrong time, or with no wish"
            says = "wish='no' is neither True nor False" if rank == 1 else no_wish
            raises(AttachError, partial(session.discard, "no" if rank == 1 else False), says)
            assert not session.discard(wish=False)
            optimizer.step()
            optimizer.zero_grad()
            raises(AttachError, session.discard, early)
            passed(model)
            assert session.discard(rank == 2)
            if algorithm.startswith("topk"):
                write = "write optimizer.zero_grad() after session.discard()"
                raises(AttachError, partial(passed, model), write)
            optimizer.zero_grad()
            raises(AttachError, session.discard, early)
            passed(model)
            if algorithm.startswith("topk"):
                optimizer.zero_grad()
                passed(model)
                assert session.discard(rank == 2), "the first was taken back when its gradients were cleared"
            elif rank == 1:
                optimizer.zero_grad()
                raises(AttachError, session.discard, early)
            else:
                raises(AttachError, session.discard, "another rank has called it")
        raises(AttachError, session.discard, "was closed")


@check
def what_cannot_be_discarded_is_refused() -> None:
    for algorithm, write in (
        ("pipesgd", "attach the same"),
        ("priority", "attach 'fusion'"),
        ("dear", "'fusion'"),
    ):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm) as session:
            model(torch.randn(8, 20)).sum().backward()
            raises(AttachError, session.discard, write)
            optimizer.step()
    model = wrapped()
    both = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model.module[0], model.module[2:])]
    with tacit.attach(model, both, "dense") as session:
        model(torch.randn(8, 20)).sum().backward()
        both[0].step()
        raises(AttachError, session.discard, "is half taken")
        both[1].step()
    model = wrapped()
    scaler = torch.amp.GradScaler("cpu")
    with tacit.attach(model, sgd(model), "dense", scaler=scaler) as session:
        raises(AttachError, session.discard, "without a scaler")


if __name__ == "__main__":
    CHECKS.run()
