"""What is given to `attach`: wrappers are taken off where that is plain, and everything else is named."""

import logging
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import tacit
from tacit.attaching.arguments import ddp_of, optimizers_of
from tacit.attaching.requirements import optimizers, warn_of_late_gradients
from tacit.attaching.step_discarding import no_wish
from tacit.levels.spec import AttachSpec
from tacit.optimizer_hooks.momentum import planned
from tacit.session.learning_rates import Rates


class Accelerated(Optimizer):
    """As Accelerate's: it says that it is an optimizer, and is only around one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class Lightning:
    """As Lightning's: around an optimizer, and none itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def sgd() -> SGD:
    return SGD(nn.Linear(2, 2).parameters(), lr=0.1)


class Bare(Optimizer):
    """Is made without Optimizer's own __init__."""

    def __init__(self) -> None: ...


class Sharded(SGD):
    """As torch's ZeroRedundancyOptimizer and fairscale's OSS, by its method."""

    def consolidate_state_dict(self, to: int = 0) -> None: ...


def test_wrapped_optimizers_are_unwrapped() -> None:
    mine, other = sgd(), sgd()
    assert optimizers_of(None) == []
    assert optimizers_of(mine) == [mine]
    assert optimizers_of(Accelerated(mine)) == [mine]
    assert optimizers_of(Lightning(Accelerated(mine))) == [mine]
    assert optimizers_of([Lightning(mine), other]) == [mine, other]
    assert optimizers_of(each for each in (mine, other)) == [mine, other]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (StepLR(sgd(), 1), "a StepLR, which is a schedule: give attach the optimizer that it was made for"),
        (ReduceLROnPlateau(sgd()), "a ReduceLROnPlateau, which is a schedule"),
        (nn.Linear(2, 2), r"the second argument is a model: write attach\(model, optimizer, ...\)"),
        (0.1, "the optimizer is a float: give attach a torch.optim.Optimizer"),
        ("sgd", "the optimizer is a str"),
        ([sgd(), None], "the optimizer is a NoneType"),
        ({"lr": 0.1}, "the optimizer is a str"),
        (Bare(), r"a Bare without param_groups: .*call super\(\).__init__"),
    ],
)
def test_what_is_no_optimizer_is_named(given: object, says: str) -> None:
    with pytest.raises(tacit.AttachError, match=says):
        optimizers_of(given)


def test_what_does_not_fit_the_strategy_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    named = dict(model.named_parameters())

    def refused(optimizer: Optimizer, *algorithms: str) -> set[str]:
        said = {}
        for algorithm in algorithms:
            ddp: Any = SimpleNamespace(module=model, parameters_to_ignore=())
            spec = AttachSpec(model=ddp, optimizers=[optimizer], strategy=tacit.parse(algorithm))
            for why in optimizers(spec):
                said[algorithm] = why
        assert all(repr(each) in why and type(optimizer).__name__ in why for each, why in said.items())
        return {*said}

    sharded = Sharded(model.parameters(), lr=0.1)
    assert refused(sharded, "dense", "topk", "localsgd", "lowbit") == {"localsgd", "lowbit"}
    lbfgs = torch.optim.LBFGS(model.parameters())
    assert refused(lbfgs, "ddp", "dense", "bf16", "localsgd", "topk", "int8", "lowbit") == {
        "topk",
        "int8",
        "lowbit",
    }
    relative = Optimizer(model.parameters(), {"lr": None})
    names = "dense", "topk", "diloco", "lowbit", "daso", "slowmo", "qsr", "adacomm"
    assert refused(relative, *names) == {"slowmo", "qsr", "adacomm"}
    for unrated in (relative, Optimizer(model.parameters(), {"size": 0.1})):
        assert Rates([unrated], named)() == {"weight": 0.0, "bias": 0.0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (sgd(), r"the first argument is an optimizer: write attach\(model, optimizer, ...\)"),
        (nn.Linear(2, 2), r"a Linear, not a DistributedDataParallel: write attach\(DistributedDataParallel"),
        (nn.Embedding(2, 2), "the model is an Embedding, not a DistributedDataParallel"),
        (None, "the model is a NoneType"),
    ],
)
def test_what_is_no_ddp_model_is_named(given: object, says: str) -> None:
    with pytest.raises(tacit.AttachError, match=says):
        ddp_of(given)
    with pytest.raises(tacit.AttachError, match=says):
        tacit.attach(given, sgd(), "topk")  # type: ignore[arg-type]


def test_a_compiled_model_without_ddp_is_named() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")  # imports seconds of modules
    says = r"an OptimizedModule.*write attach\(torch.compile\(DistributedDataParallel\(model\)\), optimizer"
    test_what_is_no_ddp_model_is_named(compiled, says)


def test_a_sharded_model_is_named() -> None:
    from torch.distributed.fsdp import FSDPModule

    sharded = type("FSDPLinear", (FSDPModule, nn.Linear), {"__new__": lambda cls, *_: nn.Module.__new__(cls)})
    with pytest.raises(
        tacit.AttachError, match=r"the model is sharded \(FSDP2\), which has no communication hook"
    ):
        ddp_of(sharded(2, 2))


def test_what_shards_models_is_not_imported_to_look_for_it() -> None:
    """It imports a symbolic algebra system: a second of processor time in every process."""
    code = "import sys, tacit; tacit.attach; sys.exit('torch.distributed.fsdp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (tacit.Dense(), r"Dense\(\) is no strategy: write tacit.Strategy\(compressor=Dense\(\)\)"),
        (3, "3 is no strategy: write a text such as 'topk:ratio=0.01'"),
    ],
)
def test_what_is_no_strategy_is_named(given: object, says: str) -> None:
    for attach in (tacit.attach, lambda model, _, strategy: tacit.CommState(model, strategy)):
        with pytest.raises(tacit.ConfigError, match=says):
            attach(nn.Linear(2, 2), sgd(), given)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"timeout": 30}, r"timeout=30 is no .*write timeout=datetime.timedelta\(seconds=30\)"),
        ({"timeout": 30.5}, r"timedelta\(seconds=30.5\)"),
        ({"timeout": -1}, r"timeout=-1 is no datetime.timedelta above 0: .*seconds=60"),
        ({"timeout": timedelta()}, "is no datetime.timedelta above 0"),
        ({"timeout": "x"}, "timeout='x' is no datetime.timedelta"),
        ({"policy": "x"}, "policy='x' is no function: write policy=lambda name, parameter: "),
        ({"policy": tacit.Dense()}, r"policy=Dense\(\) is no function"),
        ({"policy": tacit.Dense}, "policy=Dense is no function"),
        ({"mesh": "x"}, "mesh='x' is no DeviceMesh: write mesh=.*init_device_mesh"),
    ],
    ids=str,
)
def test_arguments_of_other_types_are_named(given: dict[str, Any], says: str) -> None:
    for attach in (tacit.attach, lambda model, _, *rest, **more: tacit.CommState(model, *rest, **more)):
        with pytest.raises(tacit.AttachError, match=says):
            attach(nn.Linear(2, 2), sgd(), "topk", **given)  # type: ignore[operator]


@pytest.mark.parametrize("given", [False, True, 0, 1, 1.0, torch.tensor(True), torch.ones(1) > 2])
def test_what_is_a_wish_to_discard(given: object) -> None:
    assert no_wish(given) is None


@pytest.mark.parametrize("given", ["no", None, 2, -1, float("nan"), [], torch.ones(2)], ids=str)
def test_what_is_no_wish_is_named(given: object) -> None:
    assert "is neither True nor False: write session.discard(norm > 50)" in str(no_wish(given))


def test_a_misspelled_argument_is_named() -> None:
    with pytest.raises(TypeError, match=r"no argument 'step_per_epoch'. Did you mean 'steps_per_epoch'?"):
        tacit.attach(nn.Linear(2, 2), sgd(), "dense", step_per_epoch=3)  # type: ignore[call-arg]


def test_a_schedule_of_momentum_is_named_where_momentum_is_taken() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    OneCycleLR(optimizer, 0.1, total_steps=9)
    with pytest.raises(tacit.AttachError, match=r"a scheduler changes .* cycle_momentum=False"):
        planned(tacit.parse("dgc"), None, [optimizer], dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("algorithm", "kind", "said"),
    [
        ("topk:ratio=0.01", AdamW, True),
        ("efsign", AdamW, True),
        ("topk", SGD, False),
        ("lowbit", AdamW, False),
    ],
)
def test_what_sends_late_warns_with_adam(
    algorithm: str, kind: type[Optimizer], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = kind(nn.Linear(2, 2).parameters(), lr=0.1)  # type: ignore[call-arg]
    with caplog.at_level(logging.WARNING, "tacit"):
        warn_of_late_gradients(tacit.parse(algorithm), [optimizer])
    assert ("late, which cost accuracy with AdamW: take 'lowbit'" in caplog.text) == said
