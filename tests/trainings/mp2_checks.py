"""What is checked of `mp2`, with parameters of each type, on as many processes as the launch has."""

import logging
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from laws import Peers
from rank_training import Checks, everywhere, flat, network, same_on_all_ranks, sgd, steps, wrapped
from torch import nn

import tacit
from tacit.contracts import Matrix
from tacit.exchange.driver import drive
from tacit.transports.torch_distributed import TorchTransport

CHECKS = Checks()
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
N, ROUNDS = 600, 40
COMPRESSOR = tacit.prediction.Predicted(
    budget=0.3,
    predictor=tacit.prediction.Linear(),
    full_steps=2,
    horizon=10**6,
    whole_below=1,
    matrices=(Matrix(0, 20, 30),),
)


@CHECKS.add
def checksums_are_exact_in_every_type() -> None:
    """In 40 rounds nearly all of the 32 checksums come up; ranks that agree are never told to differ."""
    peers, rank = dist.get_world_size(), dist.get_rank()
    transport = TorchTransport(dist.group.WORLD, timedelta(seconds=30))
    transport.open({"world": 3})
    for dtype in TYPES:
        here = Peers(COMPRESSOR, peers, N)
        state = COMPRESSOR.init(torch.empty(N, dtype=dtype))
        for number in range(ROUNDS):
            x = torch.randn(N, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
            context = here._context(rank, torch.empty_like(x))
            outcome = drive(here.topology.conduct(x, COMPRESSOR, state, context), transport)
            assert same_on_all_ranks(outcome.mean.view(torch.uint8))
            # What is sent in full is averaged in the type of the parameters: as near as this tells.
            if number < 2:
                mean = torch.stack(everywhere(x)).double().mean(0)
                assert float((outcome.mean - mean).abs().max()) <= 8 * torch.finfo(dtype).eps
            state, here.round = outcome.state, number + 1
        rates = state["rates"]
        assert float(rates[0]) == 0.0
    transport.close()


@CHECKS.add
def it_trains_in_every_type() -> None:
    for dtype in TYPES:
        model = wrapped(network().to(dtype))
        optimizer = sgd(model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        with tacit.attach(model, optimizer, "mp2:rescale=false,sync_every=1,budget=0.4"):
            for _ in range(12):
                optimizer.zero_grad()
                x = torch.randn(64, 20, generator=generator)
                y = x[:, :5].argmax(1)
                loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        assert same_on_all_ranks(flat(model).view(torch.uint8)), dtype
        assert losses[-1] < losses[0], dtype


class Notes(logging.Handler):
    """What tacit has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def ended(algorithm: str, count: int, **known: int) -> tuple[list[int | None], list[str]]:
    """For how many steps buckets have planned; and what was said of a training of `count` steps."""
    notes, model = Notes(), wrapped()
    logging.getLogger("tacit").addHandler(notes)
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm, **known) as session:
        buckets = [bucket.compressor.horizon for bucket in session.session.buckets]
        steps(model, optimizer, count)
    logging.getLogger("tacit").removeHandler(notes)
    return buckets, notes.said


@CHECKS.add
def the_budget_is_for_as_many_steps_as_attach_was_told() -> None:
    mp2, short = "mp2:rescale=false,sync_every=1,predictor=stale", "the budget was for"
    buckets, said = ended(mp2, 40, steps_per_epoch=20, epochs=2)
    assert set(buckets) == {40}
    assert not said
    # One that ends early has sent more than was planned, and says so; one that goes on has not.
    buckets, said = ended(mp2, 20, steps_per_epoch=20, epochs=2)
    assert sum(short in note for note in said) == (dist.get_rank() == 0), said
    buckets, said = ended(mp2, 50, steps_per_epoch=20, epochs=2)
    assert not said
    buckets, said = ended(mp2 + ",horizon=200", 30, steps_per_epoch=20, epochs=2)
    assert set(buckets) == {200}
    assert sum(short in note for note in said) == (dist.get_rank() == 0), said
    buckets, said = ended(mp2, 30)
    assert set(buckets) == {None}
    assert sum(short in note for note in said) == (dist.get_rank() == 0), said
    # So few steps that no plan fits are told of as they begin, too.
    buckets, said = ended(mp2, 10, steps_per_epoch=10, epochs=1)
    assert set(buckets) == {None}
    assert any("budget=0.11 cannot be kept in 10 steps" in note for note in said), said


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
