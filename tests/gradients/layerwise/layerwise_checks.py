"""Checks of gradients that leave layer by layer, on real Gloo processes: all on all ranks of one launch."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rank_training import Checks, close_to, flat, network, raises, same_on_all_ranks, sgd, steps, wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import tacit
from tacit.errors import AttachError, NonFinite
from tacit.gradients.layerwise import planner

CHECKS = Checks()
check = CHECKS.add

ALL = (
    "fusion",
    "fusion:megabytes=0.1",
    "priority",
    "priority:megabytes=0.1",
    "priority:megabytes=0.5,credit=0.6",
    "priority:megabytes=0.03,credit=0.06",
    "dear",
    "dear:megabytes=0.1,credit=0.3",
)
FEW = ("fusion", "priority:megabytes=0.05,credit=0.1", "dear:megabytes=0.1,credit=0.3")
"""One of each way in which gradients leave."""
ALSO_ON_THREE = (
    "training_is_that_of_ddp",
    "accumulation_is_exchanged_once",
    "a_transformer_with_tied_weights_is_trained",
    "a_resumed_run_goes_on",
    "a_nan_is_an_error_that_names_its_rank",
)
"""Those that depend on how many ranks there are: sums in rings, and whom an error names."""
LONG = 12
"""Steps, of which the last are behind both plans."""

Attach = Callable[[DDP, Optimizer], tacit.Attached]
Train = Callable[[DDP, Attach], None]


def as_ddp(
    train: Train, make: Callable[[], nn.Module] = network, each: Sequence[str] = FEW, **options: object
) -> None:
    """Training is DDP's, with each: to the bit on two ranks, as a sum of two has one order; else rings add
    in other orders, which Adam would enlarge where gradients are about 0, but for a large eps."""
    found = {}
    for algorithm in ("ddp", *each):
        torch.manual_seed(3)
        model = DDP(make(), bucket_cap_mb=0.2, **options)

        def attach(model: DDP, optimizer: Optimizer, algorithm: str = algorithm) -> tacit.Attached:
            return tacit.attach(model, optimizer, algorithm)

        train(model, attach)
        assert same_on_all_ranks(flat(model)), f"{algorithm}: ranks differ"
        found[algorithm] = flat(model)
    for algorithm in each:
        if dist.get_world_size() == 2:
            assert torch.equal(found[algorithm], found["ddp"]), algorithm
        else:
            close_to(found[algorithm], found["ddp"], 2e-5)


def data(*shape: int, classes: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(LONG):
        yield (
            torch.randn(*shape, generator=generator),
            torch.randint(0, classes, shape[:1], generator=generator),
        )


@check
def training_is_that_of_ddp() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = sgd(model)
        with attach(model, optimizer):
            steps(model, optimizer, LONG)

    as_ddp(train, each=ALL if dist.get_world_size() == 2 else FEW)
    as_ddp(train, gradient_as_bucket_view=True)


@check
def messages_are_noted_once_asked_for() -> None:
    for algorithm in ("fusion:megabytes=0.1", "priority:megabytes=0.1"):
        torch.manual_seed(3)
        model = DDP(network(), bucket_cap_mb=0.2)
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm) as session:
            assert session.session is not None
            steps(model, optimizer, LONG)
            assert session.timeline().messages == ()
            for seed in range(3):
                time.sleep(0 if dist.get_rank() else 0.2)  # the others wait for its messages
                steps(model, optimizer, 1, seed=seed)
            session.flush()
            timeline = session.timeline()
        found = {step: [each for each in timeline.messages if each.step == step] for step in range(LONG + 3)}
        assert [step for step, each in found.items() if each] == [*range(LONG, LONG + 3)], algorithm
        for each in found.values():
            assert [message.turn for message in each] == [*range(len(each))]
        first, *more = found[LONG + 1]
        assert more, "the network has too few messages"
        assert first.name.partition(" ")[0] == next(iter(dict(model.module.named_parameters()))), first
        nbytes = sum(p.nbytes for p in model.module.parameters())
        assert sum(each.bytes for each in found[LONG + 1]) == nbytes
        for each in timeline.messages:
            assert each.ready <= each.left <= each.came
            assert all(wait.begun <= wait.ended for wait in each.waits)
        assert dist.get_rank() == 0 or any(each.waits for each in timeline.messages)


@check
def gradients_are_cleared_in_place() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = sgd(model)
        with attach(model, optimizer) as session:
            for x, y in data(8, 20):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if not session.strategy.name.startswith(("ddp", "fusion")):
                    session.flush()
                optimizer.zero_grad(set_to_none=False)

    as_ddp(train)
    as_ddp(train, gradient_as_bucket_view=True)


@check
def accumulation_is_exchanged_once() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = sgd(model)
        with attach(model, optimizer):
            steps(model, optimizer, LONG, micro=3)

    as_ddp(train)


@check
def a_step_has_the_options_of_its_own_time() -> None:
    """Schedules change rate and momentum behind each step, and before the next forward pass."""

    def train(model: DDP, attach: Attach) -> None:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=LONG)
        with attach(model, optimizer):
            for x, y in data(8, 20):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()

    as_ddp(train)


@check
def two_optimizers_step_in_turn() -> None:
    def train(model: DDP, attach: Attach) -> None:
        weights = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.05, momentum=0.9)
        biases = torch.optim.Adam([p for p in model.parameters() if p.dim() <= 1], lr=0.01, eps=0.1)
        with attach(model, [weights, biases]):
            for x, y in data(8, 20):
                nn.functional.cross_entropy(model(x), y).backward()
                for optimizer in (weights, biases):
                    optimizer.step()
                    optimizer.zero_grad()

    as_ddp(train)


class Language(nn.Module):
    """Tied weights; a parameter of the module's own; parts whose weights others use in their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.places = nn.Parameter(torch.randn(7, 32) / 10)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.tokens(x) + self.places))


@check
def a_transformer_with_tied_weights_is_trained() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        with attach(model, optimizer):
            for _ in range(LONG):
                x = torch.randint(0, 50, (4, 7), generator=generator)
                loss = nn.functional.cross_entropy(model(x).transpose(1, 2), x.roll(1, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    as_ddp(train, Language)


class Restless(nn.Module):
    """In its last forward passes it begins with a parameter of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.passes = network(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y: Tensor = self.inner(x if self.passes < LONG - 2 else x + self.inner[-1].bias.sum())
        return y


@check
def a_parameter_may_be_used_elsewhere_later() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = sgd(model)
        with attach(model, optimizer):
            steps(model, optimizer, LONG)

    as_ddp(train, Restless, each=FEW[1:])


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5)).to(memory_format=torch.channels_last)


@check
def channels_last_and_batch_norm_are_trained_and_evaluated() -> None:
    def train(model: DDP, attach: Attach) -> None:
        optimizer = sgd(model)
        with attach(model, optimizer):
            for i, (x, y) in enumerate(data(4, 3, 12, 12)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if i % 3 == 0:  # what comes between a step and the next forward pass in training
                    model.eval()
                    with torch.inference_mode() if i % 2 else torch.no_grad():
                        model.module(x)
                    model.train()

    as_ddp(train, convolutional)


@check
def what_is_saved_behind_a_step_has_taken_it() -> None:
    saved: dict[str, list[Tensor]] = {}
    for algorithm in ("ddp", "priority"):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, LONG)
            whole = optimizer.state_dict()["state"]
            saved[algorithm] = [
                *model.module.state_dict().values(),
                *(whole[i]["momentum_buffer"] for i in whole),
            ]
            saved[algorithm] = [each.clone() for each in saved[algorithm]]
    for ours, theirs in zip(saved["priority"], saved["ddp"], strict=True):
        close_to(ours, theirs, 0.0 if dist.get_world_size() == 2 else 2e-5)


@check
def a_resumed_run_goes_on() -> None:
    for algorithm in ("priority", *FEW):
        whole = wrapped()
        optimizer = sgd(whole)
        with tacit.attach(whole, optimizer, algorithm) as session:
            steps(whole, optimizer, LONG)
            session.flush()
            kept = (whole.state_dict(), optimizer.state_dict(), session.state_dict())
            path = Path(sys.argv[1]) / f"{dist.get_rank()}.pt"
            torch.save(kept, path)
            steps(whole, optimizer, 4, seed=1)
        model = wrapped()
        again = sgd(model)
        with tacit.attach(model, again, algorithm) as session:
            ours, theirs, state = torch.load(path, weights_only=True)
            model.load_state_dict(ours)
            again.load_state_dict(theirs)
            session.load_state_dict(state)
            steps(model, again, 4, seed=1)
        assert torch.equal(flat(model), flat(whole)), algorithm


def planned(algorithm: str = "priority") -> tuple[DDP, Optimizer, tacit.Attached]:
    """A model that is trained, with steps that are put off."""
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, algorithm)
    steps(model, optimizer, LONG)
    return model, optimizer, session


def backward(model: DDP) -> None:
    nn.functional.cross_entropy(model(torch.ones(8, 20)), torch.zeros(8, dtype=torch.long)).backward()


@check
def a_gradient_that_is_under_way_cannot_be_looked_at() -> None:
    model, optimizer, session = planned()
    backward(model)
    says = "is still under way"
    raises(AttachError, partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0), says)
    raises(AttachError, partial(nn.utils.clip_grad_value_, model.parameters(), 1.0), says)
    raises(AttachError, lambda: next(model.parameters()).grad.norm(), says)
    raises(AttachError, partial(optimizer.zero_grad, set_to_none=False), says)
    raises(AttachError, lambda: backward(model), says)
    optimizer.step()
    raises(AttachError, optimizer.step, "a second optimizer.step")
    dist.barrier()
    session.close()


@check
def parameters_that_are_changed_before_their_step_are_refused() -> None:
    model, optimizer, session = planned()
    backward(model)
    optimizer.step()
    with torch.no_grad():
        next(model.parameters()).clamp_(-1, 1)
    raises(AttachError, lambda: model(torch.ones(8, 20)), "was changed after optimizer.step")
    dist.barrier()
    raises(AttachError, session.close, "was changed after optimizer.step")

    model, optimizer, session = planned()
    backward(model)
    optimizer.step()
    session.flush()
    with torch.no_grad():
        next(model.parameters()).clamp_(-1, 1)
    model(torch.ones(8, 20))
    session.close()


@check
def steps_left_out_leave_no_gradient() -> None:
    model, optimizer, session = planned()
    before = flat(model)
    backward(model)
    optimizer.zero_grad()
    session.flush()
    assert not torch.equal(flat(model), before)  # the step before
    before = flat(model)
    backward(model)
    optimizer.zero_grad()
    assert torch.equal(flat(model), before)
    session.close()
    assert all(p.grad is None for p in model.parameters())


@check
def a_nan_is_an_error_that_names_its_rank() -> None:
    for algorithm in FEW:
        model, optimizer, session = planned(algorithm)
        x = torch.full((8, 20), float("nan") if dist.get_rank() == 1 else 1.0)

        def step(model: DDP = model, x: Tensor = x, optimizer: Optimizer = optimizer) -> None:
            nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
            optimizer.step()
            model(torch.ones(8, 20))

        raises(NonFinite, step, "rank 1")
        dist.barrier()
        session.close()


@check
def what_cannot_be_stepped_by_layers_is_refused() -> None:
    model = wrapped()
    raises(AttachError, lambda: tacit.attach(model, [], "priority"), "give attach the optimizer")
    lbfgs = torch.optim.LBFGS(model.parameters())
    raises(AttachError, lambda: tacit.attach(model, lbfgs, "priority"), "LBFGS is not known to step each")
    unused = DDP(network(), find_unused_parameters=True)
    for algorithm in ("fusion", "priority"):
        says = "find_unused_parameters=False"
        raises(AttachError, partial(tacit.attach, unused, sgd(unused), algorithm), says)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says in several ways that scripting is old; users do it
        scripted = DDP(nn.Sequential(torch.jit.script(nn.Linear(20, 5))))
        compiled = DDP(nn.Sequential(torch.compile(nn.Linear(20, 5))))
    raises(AttachError, lambda: tacit.attach(scripted, sgd(scripted), "priority"), "is scripted")
    raises(AttachError, lambda: tacit.attach(compiled, sgd(compiled), "priority"), "is compiled")
    scaler = torch.amp.GradScaler("cpu")
    raises(AttachError, lambda: tacit.attach(model, sgd(model), "priority", scaler=scaler), "a scaler passes")
    raises(AttachError, lambda: tacit.CommState(model, "fusion"), "write tacit.attach(model, optimizer")
    with tacit.attach(scripted, sgd(scripted), "fusion"):
        backward(scripted)


if __name__ == "__main__":
    planner.SKIPPED, planner.SEEN = 2, 3  # both plans are made within LONG steps
    CHECKS.run(sys.argv[2:])
