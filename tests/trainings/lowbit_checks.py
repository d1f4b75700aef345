"""What is checked of `lowbit`, with parameters of each type, on as many processes as the launch has."""

import copy
import sys

import torch
import torch.distributed as dist
from rank_training import Checks, everywhere, flat, network, same_on_all_ranks, sgd, steps, wrapped
from torch import nn

import tacit

CHECKS = Checks()
KINDS = ("lowbit", "lowbit:bits=2,sync_every=2", "lowbit:late=1,predictor=least-squares")
TRAINED = [(torch.bfloat16, algorithm) for algorithm in KINDS]
TRAINED += zip((torch.float16, torch.float32, torch.float64), KINDS, strict=True)
"""Each kind in the type that rounds most, and one in each other type."""


@CHECKS.add
def a_few_bits_train_in_every_type_and_end_equal() -> None:
    for dtype, algorithm in TRAINED:
        model = wrapped(network().to(dtype))
        optimizer = sgd(model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses = []
        with tacit.attach(model, optimizer, algorithm):
            for _ in range(12):
                optimizer.zero_grad()
                x = torch.randn(64, 20, generator=generator)
                loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), x[:, :5].argmax(1))
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            assert not same_on_all_ranks(flat(model).view(torch.uint8)), "each keeps its own"
        assert same_on_all_ranks(flat(model).view(torch.uint8)), (dtype, algorithm)
        assert losses[-1] < losses[0], (dtype, algorithm)


@CHECKS.add
def adams_variance_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    """With what it is scaled by; and behind the session it is the same on all ranks, as that of the mean."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
        for step in range(first, stop):
            data = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    ends = []
    for stops in (False, True):
        model = wrapped()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
        session = tacit.attach(model, optimizer, "lowbit:sync_every=2")
        train(model, optimizer, 0, 13)
        session.sync()
        if stops:
            held = copy.deepcopy([each.state_dict() for each in (model, optimizer, session)])
            assert "variances" in held[2]
            session.close()
            model = wrapped()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
            session = tacit.attach(model, optimizer, "lowbit:sync_every=2")
            for each, state in zip((model, optimizer, session), held, strict=True):
                each.load_state_dict(state)
        train(model, optimizer, 13, 27)
        session.close()
        variances = torch.cat([optimizer.state[p]["exp_avg_sq"].view(-1) for p in model.parameters()])
        assert same_on_all_ranks(variances)
        ends.append(torch.cat([flat(model), variances]))
    assert torch.equal(*ends)


@CHECKS.add
def statistics_are_each_ranks_own_until_replicas_meet() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 5))
    model = wrapped(layers)
    optimizer, norm = sgd(model), layers[1]
    with tacit.attach(model, optimizer, "lowbit") as session:
        steps(model, optimizer, 4)
        own, before = norm.running_mean.clone(), session.metrics()["bytes_out"]
        assert not same_on_all_ranks(own)
        session.sync()
        sent = session.metrics()["bytes_out"] - before
        assert sent <= 4096, f"{sent} bytes: parameters take no round"
        torch.testing.assert_close(norm.running_mean, torch.stack(everywhere(own)).mean(0))
        assert same_on_all_ranks(flat(model))
        steps(model, optimizer, 2, seed=1)
        assert not same_on_all_ranks(norm.running_mean)
    assert same_on_all_ranks(norm.running_mean)
    assert same_on_all_ranks(norm.running_var)


@CHECKS.add
def entropy_coding_changes_bytes_alone() -> None:
    """Also where the messages of ranks are of different lengths, and with answers that come late."""
    for beside in ("bits=3", "bits=2", "bits=3,late=1"):
        ends, sent = [], []
        for coded in ("false", "true"):
            torch.manual_seed(0)
            model = wrapped(nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 5)))
            optimizer = sgd(model)
            with tacit.attach(model, optimizer, f"lowbit:{beside},entropy={coded}") as session:
                steps(model, optimizer, 6)
                sent.append(session.metrics()["bytes_out"])
            ends.append(flat(model))
        assert torch.equal(*ends), beside
        assert same_on_all_ranks(ends[0])
        assert sent[1] < 0.85 * sent[0], (beside, sent)


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:])
