"""What is checked of `auto` on real Gloo processes: two ranks, each a node of its own or both on one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_training import Checks, close_to, flat, here, network, raises, same_on_all_ranks, sgd, wrapped
from test_training import Line
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

import tacit
from tacit.planning.decider import Choice, ChoosingSession
from tacit_lab.recipes.training import Task
from tacit_lab.recipes.training import train as train_recipe
from tacit_lab.records import EndRecord, Record, RunRecord

CHECKS = Checks()
check = CHECKS.add


class Fixed:
    """Chooses what it is told to, in turn, and notes what it was asked."""

    def __init__(self, *choices: str, steps: int = 3, seconds: float = 1.0) -> None:
        self.steps, self.seconds = steps, seconds
        self._left = list(choices)
        self.measured: list[int] = []
        self.begun: list[int] = []
        self.decided = 0

    def begin(self, session: ChoosingSession) -> None:
        self.begun.append(int(session.metrics()["steps"]) if session.levels else 0)

    def measure(self, session: ChoosingSession) -> None:
        mine = torch.tensor([float(dist.get_rank())])
        assert session.from_all(mine).view(-1).tolist() == [*range(dist.get_world_size())]
        self.measured.append(int(session.metrics()["steps"]))

    def decide(self) -> Choice:
        self.decided += 1
        text = self._left.pop(0)
        return Choice(
            text, f"{text} it is", self.seconds, (("ddp", 1.0), (text, self.seconds), ("daso", None))
        )


def data(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    yield torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
    for step in range(first, stop):
        for x, y in data(step):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def by_hand(text: str, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> Tensor:
    """Three steps with `dense`, and seven with this strategy, attached behind them if it is another one."""
    model = wrapped()
    optimizer = optimizer_of(model)
    with tacit.attach(model, optimizer, "dense"):
        train(model, optimizer, 0, 10 if text == "dense" else 3)
    with tacit.attach(model, optimizer, text):
        train(model, optimizer, 10 if text == "dense" else 3, 10)
    return flat(model)


@contextmanager
def logged() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tacit")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@check
def from_the_choice_on_it_is_the_chosen_strategy_bit_for_bit() -> None:
    dgc = "dgc:ratio=0.05,momentum=0.9,nesterov=false"
    every = ("ddp", "dense", "bf16", "topk:ratio=0.05", dgc, "localsgd:sync_every=2")
    for text in here(every, ("topk:ratio=0.05", "localsgd:sync_every=2")):
        model, decider = wrapped(), Fixed(text)
        optimizer = sgd(model)
        with (
            logged() as lines,
            tacit.attach(model, optimizer, "auto:accept=periodic", decider=decider) as session,
        ):
            train(model, optimizer, 0, 2)
            assert session.choice is None
            assert "chooses after step 3" in session.active_path
            train(model, optimizer, 2, 10)
            assert session.choice is not None
            assert session.choice.algorithm == text
            assert session.choice.considered[2] == ("daso", None)
            assert f"{text} it is" in session.active_path
            assert "daso: not predicted" in session.describe()
            assert session.metrics()["steps"] == 10
            times = session.timeline()
            assert [each.step for each in times.steps] == [*range(10)]
            assert [each.ended for each in times.steps] == sorted(each.ended for each in times.steps)
        assert torch.equal(flat(model), by_hand(text)), text
        assert (decider.measured, decider.decided) == ([3], int(dist.get_rank() == 0))
        chosen = [line for line in lines if "goes on after step 3" in line]
        assert len(chosen) == (dist.get_rank() == 0)
        assert not optimizer._optimizer_step_post_hooks
        assert optimizer.param_groups[0]["momentum"] == 0.9


@check
def with_adam_a_variance_is_kept_once_that_was_chosen_and_given_back() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    for text in ("onebit-adam:freeze_step=2,refresh=1", "zeroone-adam:freeze_step=2,refresh=1"):
        model = wrapped()
        optimizer = adam(model)
        seen = []
        with tacit.attach(model, optimizer, "auto:accept=periodic", decider=Fixed(text)) as session:
            for step in range(10):
                train(model, optimizer, step, step + 1)
                seen.append(optimizer.param_groups[0]["betas"][0])
            assert session.choice is not None
            assert session.choice.algorithm == text
        assert torch.equal(flat(model), by_hand(text, adam)), text
        assert (0.0 in seen[5:]) == text.startswith("onebit")
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert same_on_all_ranks(flat(model))


@check
def dgc_goes_on_from_the_momentum_that_it_takes_over() -> None:
    def columns() -> nn.Module:
        model = network()
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        return model

    for options in ({}, {"nesterov": True, "weight_decay": 0.05}, {"maximize": True}):
        ends = []
        text = f"dgc:ratio=1.0,masking=false,nesterov={'nesterov' in options}"
        for algorithm in ("dense", text):
            model = wrapped(columns())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)  # type: ignore[arg-type]
            with tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed(algorithm)):
                train(model, optimizer, 0, 10)
            ends.append(flat(model))
        close_to(*ends, 2e-6 * (1 + float((ends[0] - flat(columns())).abs().max())))


@check
def what_was_chosen_is_in_a_checkpoint_and_goes_on_without_measuring() -> None:
    ends = []
    for stops in (False, True):
        model = wrapped()
        optimizer = sgd(model)
        session = tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed("topk:ratio=0.05"))
        train(model, optimizer, 0, 6)
        if stops:
            saved = session.state_dict()
            mine = model.state_dict(), optimizer.state_dict()
            session.close()
            model, decider = wrapped(), Fixed()
            optimizer = sgd(model)
            session = tacit.attach(model, optimizer, "auto:accept=feedback", decider=decider)
            model.load_state_dict(mine[0])
            optimizer.load_state_dict(mine[1])
            session.load_state_dict(saved)
            assert session.choice is not None
            assert session.choice.reason == "topk:ratio=0.05 it is"
            assert session.metrics()["steps"] == 6
        else:
            session.load_state_dict(session.state_dict())  # as a stop changes where DDP's buckets settle
        train(model, optimizer, 6, 10)
        session.close()
        ends.append(flat(model))
    assert decider.measured == []
    assert torch.equal(*ends)
    every: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, saved)
    with tacit.attach(model, optimizer, "topk:ratio=0.05") as plain:
        plain.load_state_dict(saved)
        assert plain.metrics()["steps"] == 3
    with tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed()) as session:
        few = {key: each for key, each in saved.items() if "residual" not in key}  # as DCP has loaded it
        says = "Attach 'topk:ratio=0.05' in its place"
        raises(tacit.CheckpointError, lambda: session.load_state_dict(few), says)
        session.load_state_dict(tacit.join_states(every))
        assert session.metrics()["steps"] == 6


@check
def a_checkpoint_from_before_the_choice_measures_anew() -> None:
    model, decider = wrapped(), Fixed("bf16")
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "auto", decider=Fixed("ddp")) as session:
        train(model, optimizer, 0, 2)
        saved = session.state_dict()
    with tacit.attach(model, optimizer, "auto", decider=decider) as session:
        session.load_state_dict(saved)
        train(model, optimizer, 2, 4)
        assert session.choice is None
        train(model, optimizer, 4, 6)
        assert decider.measured == [5]
        assert session.choice is not None
    with tacit.attach(model, optimizer, "dense") as plain:
        other = plain.state_dict()
    with tacit.attach(model, optimizer, "auto", decider=decider) as session:
        raises(tacit.CheckpointError, lambda: session.load_state_dict(other), "of no session of 'auto'")


@check
def a_decider_that_wants_more_steps_is_asked_again_after_the_same_one_on_all_ranks() -> None:
    class Curious(Fixed):
        def measure(self, session: ChoosingSession) -> int | None:  # type: ignore[override]
            super().measure(session)
            return dist.get_rank() if len(self.measured) == 1 else None  # the most that a rank wants is 1

    model, decider = wrapped(), Curious("int8")
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "auto", decider=decider) as session:
        train(model, optimizer, 0, 3)
        assert session.choice is None
        assert "chooses after step 4" in session.active_path
        train(model, optimizer, 3, 10)
        assert session.choice is not None
    assert (decider.measured, decider.decided) == ([3, 4], int(dist.get_rank() == 0))
    assert same_on_all_ranks(flat(model))


@check
def the_planner_looks_at_more_steps_where_they_are_short() -> None:
    for enough, last in ((0.0, 4), (1e9, 10)):
        model = wrapped()
        optimizer = sgd(model)
        with (
            patch("tacit.planning.planner.ENOUGH", enough),
            tacit.attach(model, optimizer, "auto") as session,
        ):
            train(model, optimizer, 0, last - 1)
            assert session.choice is None
            train(model, optimizer, last - 1, last)
            assert session.choice is not None


@check
def a_decider_that_fails_is_an_error_on_all_ranks() -> None:
    class Broken(Fixed):
        def decide(self) -> Choice:
            raise OSError("no link answers")

    class Blind(Fixed):
        def measure(self, session: ChoosingSession) -> None:
            if dist.get_rank() == 1:
                raise OSError("no clock")

    class Vague(Fixed):
        def measure(self, session: ChoosingSession) -> float:  # type: ignore[override]
            return 1.5 * dist.get_rank()

    for decider, says in (
        (Broken(), "auto: Broken could not choose on rank 0: OSError: no link answers"),
        (Blind(), "auto: Blind could not measure on rank 1: OSError: no clock"),
        (Vague(), "auto: Vague could not measure on rank 1: ConfigError: Vague.measure()=1.5 is not"),
        (Fixed("topk:ratio=7"), "ratio=7"),
        (Fixed("dgc:momentum=0.5"), "Fixed chose 'dgc:momentum=0.5', which does not fit: the optimizer has"),
        (Fixed("auto"), "name an algorithm"),
        (Fixed("localsgd"), "'localsgd' risks more than accept=rounded allows"),
        (Fixed("bf16", seconds=float("nan")), "seconds=nan"),
    ):
        model = wrapped()
        optimizer = sgd(model)

        def run() -> None:
            with tacit.attach(model, optimizer, "auto", decider=decider):  # noqa: B023
                train(model, optimizer, 0, 4)  # noqa: B023

        raises(tacit.DecisionError, run, says)


@check
def a_strategy_that_cannot_begin_leaves_plain_ddp() -> None:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed("topk"))
    with patch("tacit.api.choosing.AtWork", side_effect=tacit.AttachError("no room for it")):
        raises(tacit.AttachError, lambda: train(model, optimizer, 0, 4), "no room for it")
    assert session.closed
    session.close()
    train(model, optimizer, 4, 6)
    assert same_on_all_ranks(flat(model))
    with tacit.attach(model, optimizer, "topk"):
        train(model, optimizer, 6, 8)


@check
def errors_count_the_steps_before_the_choice_too() -> None:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, "auto:accept=periodic", decider=Fixed("localsgd:sync_every=100"))
    train(model, optimizer, 0, 7 + dist.get_rank())
    raises(tacit.UnevenData, session.close, "rank 0 closed its session after 7 steps, rank 1 after 8: ranks")

    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, "auto:accept=feedback", decider=Fixed("topk"))
    train(model, optimizer, 0, 4)
    next(model.parameters()).register_hook(lambda grad: grad * torch.nan)
    raises(tacit.NonFinite, lambda: train(model, optimizer, 4, 5), "in step 4: no rank")
    session.close()


@check
def steps_that_take_another_time_than_foretold_ask_again() -> None:
    model, decider = wrapped(), Fixed("bf16", "topk:ratio=0.5", seconds=2.0, steps=2)
    optimizer, rank = sgd(model), dist.get_rank()
    with tacit.attach(model, optimizer, "auto:accept=feedback,watch=5,rest=6", decider=decider) as session:
        # Each rank alone would ask again, and their mean is what was foretold.
        session._choosing._seconds = lambda: (1.0, 3.0)[rank]  # type: ignore[attr-defined]
        train(model, optimizer, 0, 9)  # compared after steps 8 and 13
        assert decider.measured == [2]
        session._choosing._seconds = lambda: (2.0, 4.0)[rank]  # type: ignore[attr-defined]
        train(model, optimizer, 9, 14)
        assert decider.begun == [0, 13], "the next steps are measured"
        assert decider.measured == [2]
        train(model, optimizer, 14, 15)
        assert decider.measured == [2, 15]
        assert session.choice is not None
        assert session.choice.algorithm == "topk:ratio=0.5"
        train(model, optimizer, 15, 18)  # it rests up to step 21
        assert session.metrics()["steps"] == 18
    assert same_on_all_ranks(flat(model))


@check
def the_planner_foretells_and_all_ranks_go_on_alike() -> None:
    model = wrapped()
    optimizer = sgd(model)
    with (
        patch("tacit.planning.planner.ENOUGH", 1e9),  # however slow this machine is now
        tacit.attach(model, optimizer, "auto:watch=5,rest=5,tolerance=1000") as session,
    ):
        train(model, optimizer, 0, 9)
        assert session.choice is None
        train(model, optimizer, 9, 22)
        choice = session.choice
        assert choice is not None
        foretold = {text: seconds for text, seconds in choice.considered if seconds is not None}
        assert foretold["ddp"] > 0, "DDP is foretold, whatever it takes"
        assert min(foretold.values()) <= choice.seconds <= 1.03 * min(foretold.values())
        told = [""] * dist.get_world_size()
        dist.all_gather_object(told, repr(choice))
        assert len({*told}) == 1
    assert same_on_all_ranks(flat(model))


@check
def the_record_of_a_run_says_what_was_chosen() -> None:
    task = Task(strategy=tacit.parse("auto"), epochs=3, seed=0, target=0.9, cluster="local:2", shaped=False)
    written: list[Record] = []
    with patch("tacit.planning.planner.Planner", lambda: Fixed("bf16")):
        train_recipe(task, Line(), written.append)
    head, *_, end = written
    assert isinstance(head, RunRecord)
    assert isinstance(end, EndRecord)
    assert head.strategy.startswith("AutoStrategy(accept='rounded'")
    assert (end.metrics["choice"]["algorithm"], end.metrics["choice"]["reason"]) == ("bf16", "bf16 it is")
    assert end.metrics["steps"] == 6


@check
def with_a_scaler_no_replica_is_to_move_on_its_own() -> None:
    def scaled(
        model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, first: int, stop: int
    ) -> None:
        for step in range(first, stop):
            ((x, y),) = data(step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if step in (1, 6) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    ends = []
    for chooses in (True, False):
        model, scaler = wrapped(), GradScaler("cpu", init_scale=64.0)
        optimizer = sgd(model)
        if chooses:
            decider = Fixed("topk:ratio=0.05")
            with tacit.attach(
                model, optimizer, "auto:accept=periodic", scaler=scaler, decider=decider
            ) as session:
                scaled(model, optimizer, scaler, 0, 9)
                left_out = dict(session.candidates().left_out)  # type: ignore[attr-defined]
            assert "skips steps alone" in left_out["diloco"]
            assert decider.measured == [3]  # attempts count, and the second is passed over
        else:
            with tacit.attach(model, optimizer, "dense", scaler=scaler):
                scaled(model, optimizer, scaler, 0, 3)
            with tacit.attach(model, optimizer, "topk:ratio=0.05", scaler=scaler):
                scaled(model, optimizer, scaler, 3, 9)
        ends.append(flat(model))
    assert torch.equal(*ends)


class Stranger(torch.optim.Optimizer):
    """As apex.FusedAdam or bitsandbytes.Adam8bit, which derive from none of torch's."""


@check
def candidates_are_checked_without_a_trace() -> None:
    model = wrapped()
    optimizer = sgd(model)
    for accept, text in (
        ("exact", "dense"),
        ("rounded", "qsgd"),
        ("feedback", "powersgd"),
        ("periodic", "diloco"),
    ):
        with tacit.attach(model, optimizer, f"auto:accept={accept}", decider=Fixed()) as session:
            found = session.candidates()  # type: ignore[attr-defined]
            assert found.possible[-1 if accept != "periodic" else -2] == text, found
            assert ("dgc:momentum=0.9,nesterov=false" in found.possible) == (
                accept in ("feedback", "periodic")
            )
            assert optimizer.param_groups[0]["momentum"] == 0.9
    left = dict(found.left_out)
    assert "several nodes with several ranks" in left["daso"]
    by_node = {"steps_per_epoch": 4, "epochs": 2, "mesh": init_device_mesh("cpu", (1, 2))}
    with tacit.attach(model, optimizer, "auto:accept=periodic", decider=Fixed(), **by_node) as session:
        assert "several nodes" in dict(session.candidates().left_out)["daso"]  # type: ignore[attr-defined]
    with tacit.attach(
        model, torch.optim.Adam(model.parameters()), "auto:accept=feedback", decider=Fixed()
    ) as session:
        left = dict(session.candidates().left_out)  # type: ignore[attr-defined]
        assert [*left] == ["efsign", "topk:ratio=0.01", "dgc", "powersgd"]
        assert "with Adam, which does not step as SGD does" in left["efsign"]
    for stranger in (torch.optim.RMSprop(model.parameters()), Stranger(model.parameters(), {"lr": 0.1})):
        with tacit.attach(model, stranger, "auto:accept=feedback", decider=Fixed()) as session:
            left = dict(session.candidates().left_out)  # type: ignore[attr-defined]
        assert {"efsign", "topk:ratio=0.01", "powersgd"} <= {*left}
    assert "neither torch.optim.Adam" in dict(found.left_out)["onebit-adam"]
    assert "neither torch.optim.Adam" in dict(found.left_out)["zeroone-adam"]
    for betas, chosen in (((0.8, 0.8), "onebit-adam:beta=0.8"), ((0.8, 0.9), None)):
        groups = [
            {"params": each.parameters(), "betas": (beta, 0.95)}
            for each, beta in zip((model.module[0], model.module[1:]), betas, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups)
        with tacit.attach(model, optimizer, "auto:accept=periodic", decider=Fixed()) as session:
            found = session.candidates()  # type: ignore[attr-defined]
        assert "zeroone-adam" in found.possible
        assert (chosen in found.possible) == (chosen is not None), found
        assert ("their betas[0] differ" in dict(found.left_out).get("onebit-adam", "")) == (chosen is None)
        assert [group["betas"][0] for group in optimizer.param_groups] == [*betas]


@check
def what_cannot_be_chosen_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)
    raises(tacit.AttachError, lambda: tacit.attach(model, None, "auto", decider=Fixed()), "give attach the")
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, optimizer, "auto", decider=Fixed(), weight=2.0),
        "begins with plain averages",
    )
    raises(
        tacit.AttachError, lambda: tacit.attach(model, optimizer, "topk", decider=Fixed()), "decider= is for"
    )
    raises(tacit.AttachError, lambda: tacit.CommState(model, "auto"), "which no communication hook sees")
    alone = torch.nn.parallel.DistributedDataParallel(
        nn.Linear(2, 2), process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    )
    with tacit.attach(alone, sgd(alone), "auto", decider=Fixed()) as session:  # nor is there any choice
        assert session.strategy.name == "ddp"
    mine = "auto" if dist.get_rank() else "auto:accept=exact"
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, optimizer, mine, decider=Fixed()),
        "attach another strategy than rank 0",
    )
    with tacit.attach(model, optimizer, "auto", decider=Fixed("efsign")):
        train(model, optimizer, 0, 2)
        raises(tacit.DecisionError, lambda: train(model, optimizer, 2, 3), "risks more than accept=rounded")


if __name__ == "__main__":
    CHECKS.run()
