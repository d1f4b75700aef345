"""What is checked of `session.diagnose` on real Gloo processes: two ranks, each a node of its own."""

import time

import torch
import torch.distributed as dist
from auto_checks import Fixed
from rank_training import Checks, network, raises, sgd, wrapped
from torch import Tensor, nn

import tacit
from tacit.planning.diagnosis import Diagnosis
from tacit.planning.live_diagnosis import SETTLING
from tacit.transports.process_groups import gather_texts

CHECKS = Checks()
check = CHECKS.add
STEPS = 4


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, slow: int | None = None) -> None:
    x, y = torch.randn(8, 20), torch.randint(0, 5, (8,))
    for _ in range(steps):
        optimizer.zero_grad()
        if dist.get_rank() == slow:
            time.sleep(0.05)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def diagnosed(algorithm: str, slow: int | None = None, steps: int = STEPS) -> Diagnosis:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        found = session.diagnose(steps)
        train(model, optimizer, SETTLING + steps - 1, slow)
        assert found.result is None, "it is there behind the last step"
        train(model, optimizer, 1, slow)
        assert found.result is not None
    assert dist.group.WORLD is not None
    assert len({*gather_texts(found.result.to_json(), dist.group.WORLD)}) == 1, "all ranks know the same"
    return found.result


@check
def the_parts_are_the_step() -> None:
    for algorithm in ("ddp", "topk", "localsgd:sync_every=2", "diloco:sync_every=2"):
        found = diagnosed(algorithm)
        assert (found.algorithm, found.steps, found.ranks) == (algorithm, STEPS, 2)
        assert abs(sum(found.parts.values()) - found.seconds) < 1e-6 + 0.02 * found.seconds, found.parts
        assert 0 < found.limit <= found.seconds
        assert not found.notes, found.notes
        assert "ms" in str(found)


@check
def a_rank_that_starts_late_is_found() -> None:
    for algorithm in ("ddp", "dense"):
        found = diagnosed(algorithm, slow=1, steps=8)
        assert found.parts["slow rank"] > 0.015, found.parts
        kinds = {each.kind: each for each in found.findings}
        late = kinds.get("data loader", kinds.get("slow rank"))
        assert late is not None, found
        assert "rank 1 " in late.says, late


@check
def what_cannot_be_foretold_is_still_taken_apart() -> None:
    found = diagnosed("lag")
    (note,) = found.notes
    assert "cannot be predicted" in note, note


@check
def a_session_that_closes_before_is_not_diagnosed() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "dense") as session:
        found = session.diagnose(STEPS)
        train(model, optimizer, 3)
    train(model, optimizer, SETTLING + STEPS)
    assert found.result is None


@check
def it_begins_anew_where_auto_has_chosen() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed("topk")) as session:
        found = session.diagnose(STEPS)
        train(model, optimizer, 3 + SETTLING + STEPS)
        assert found.result is not None
        assert found.result.algorithm == "topk"


@check
def what_cannot_be_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "dense") as session:
        raises(tacit.ConfigError, lambda: session.diagnose(1), "such as 20")
    with tacit.attach(model, None, "dense") as session:
        raises(tacit.AttachError, session.diagnose, "give attach the optimizer")


@check
def what_is_timed_does_not_change() -> None:
    ends: list[Tensor] = []
    for timed in (False, True):
        torch.manual_seed(1)
        model = wrapped(network())
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, "topk") as session:
            if timed:
                session.diagnose(STEPS)
            train(model, optimizer, SETTLING + STEPS + 2)
            ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


if __name__ == "__main__":
    CHECKS.run()
