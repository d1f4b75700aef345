"""Training loops as people write them, on real Gloo processes: scaled, clipped, scheduled, in groups."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from rank_training import (
    Checks,
    close_to,
    everywhere,
    flat,
    here,
    network,
    raises,
    same_on_all_ranks,
    sgd,
    steps,
    trained,
    wrapped,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.errors import NonFinite

CHECKS = Checks()
check = CHECKS.add


def scaler(scale: float = 2.0**16, **options: int | float) -> GradScaler:
    return GradScaler("cpu", init_scale=scale, **options)


def poison(model: DDP, ranks: tuple[int, ...]) -> None:
    """Let one entry of a gradient overflow in the next backward of these ranks."""
    if dist.get_rank() not in ranks:
        return

    def infect(g: Tensor) -> Tensor:
        handle.remove()
        g = g.clone()
        g.view(-1)[g.numel() // 2] = math.inf
        return g

    handle = dict(model.module.named_parameters())["2.weight"].register_hook(infect)


class Loop:
    """A model that is trained by scaled steps, on data of this rank's own.

    Attributes:
        overflows: step -> the ranks on which a gradient overflows in it.
        clip: the largest norm of a gradient; None: it is left as it is.
    """

    def __init__(
        self,
        scaler: GradScaler,
        overflows: dict[int, tuple[int, ...]] | None = None,
        clip: float | None = None,
        momentum: float = 0.9,
        model: DDP | None = None,
    ) -> None:
        self.model = model or wrapped()
        self.optimizer = sgd(self.model, momentum)
        self.scaler, self.overflows, self.clip = scaler, overflows or {}, clip
        self.done = 0
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count: int, micro: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            for i in range(micro):
                if i == micro - 1:
                    poison(self.model, self.overflows.get(self.done, ()))
                x = torch.randn(8, 20, generator=self.data)
                y = torch.randint(0, 5, (8,), generator=self.data)
                with nullcontext() if i == micro - 1 else self.model.no_sync():
                    self.scaler.scale(nn.functional.cross_entropy(self.model(x), y)).backward()
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.done += 1


def ended(algorithm: str, count: int, micro: int = 1, **options: object) -> Tensor:
    """The parameters after training with a scaler of factor 2^16 that grows after 3 steps."""
    loop = Loop(scaler(growth_interval=3), **options)  # type: ignore[arg-type]
    with tacit.attach(loop.model, loop.optimizer, algorithm, scaler=loop.scaler):
        loop.steps(count, micro)
    assert same_on_all_ranks(flat(loop.model)), algorithm
    return flat(loop.model)


OVERFLOWS: dict[int, tuple[int, ...]] = {0: (2,), 4: (1,), 5: (1, 3)}


def train(
    model: DDP, optimizer: torch.optim.Optimizer, count: int, after: Callable[[], object] = lambda: None
) -> None:
    """Steps on data of this rank's own; `after` each of them."""
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        optimizer.zero_grad()
        x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


@check
def steps_that_are_given_a_closure_are_those_without() -> None:
    """Its gradients are there behind the closure only: decay's momentum, and where NaN began, go by them."""

    def run(algorithm: str, how: str, broken: int | None = None) -> Tensor:
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        data = torch.Generator().manual_seed(dist.get_rank())
        with tacit.attach(model, optimizer, algorithm):
            for step in range(6):
                x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)

                def loss(x: Tensor = x, y: Tensor = y, factor: float = math.nan if step == broken else 1.0):
                    optimizer.zero_grad()
                    loss = factor * nn.functional.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                if how == "without":
                    loss()
                    optimizer.step()
                elif how == "by position":
                    optimizer.step(loss)
                else:
                    optimizer.step(closure=loss)
        return flat(model)

    for algorithm in ("dgc:ratio=0.05", "topk:ratio=0.05", "diloco:sync_every=2,bits=4"):
        without = run(algorithm, "without")
        for how in ("by position", "by name"):
            assert torch.equal(run(algorithm, how), without), (algorithm, how)
    for how in ("without", "by name"):
        message = "Rank 0 had it first in step 3, in 0.weight"
        raises(NonFinite, lambda how=how: run("localsgd:sync_every=6", how, broken=3), message)


@check
def scaled_training_that_overflows_is_that_of_ddp() -> None:
    ddp = ended("ddp", 10, overflows=OVERFLOWS)
    for algorithm in ("dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        close_to(ended(algorithm, 10, overflows=OVERFLOWS), ddp)


@check
def scaled_gradients_accumulate() -> None:
    ddp = ended("ddp", 6, micro=3, overflows=OVERFLOWS)
    for algorithm in ("dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        close_to(ended(algorithm, 6, micro=3, overflows=OVERFLOWS), ddp)


@check
def scaled_gradients_are_clipped() -> None:
    ddp = ended("ddp", 6, clip=0.5, overflows=OVERFLOWS)
    for algorithm in ("dense", "topk:ratio=1.0"):
        close_to(ended(algorithm, 6, clip=0.5, overflows=OVERFLOWS), ddp)


@check
def the_factor_changes_nothing_that_a_compressor_does() -> None:
    for algorithm in ("topk:ratio=0.05", "sign", "randomk:ratio=0.1", "powersgd:rank=2", "bf16"):
        found, new_residual = [], []
        for each in (GradScaler("cpu", enabled=False), scaler(2.0**16, growth_interval=2)):
            loop = Loop(each)
            with tacit.attach(loop.model, loop.optimizer, algorithm, scaler=each) as session:
                loop.steps(8)
                new_residual += [
                    torch.cat(
                        [kept.tensor for kept in session.session.store.named_state().values()]
                        or [flat(loop.model)]
                    )
                ]
            found.append(flat(loop.model))
        assert same_on_all_ranks(found[1]), algorithm
        close_to(*found, tolerance=1e-5)
        close_to(*new_residual, tolerance=1e-4)


@check
def the_factor_keeps_small_gradients_from_vanishing_on_their_way() -> None:
    small = 1e-8  # of fp16, what is below 3e-8 is nothing

    def moved(algorithm: str | tacit.Strategy) -> Tensor:
        model, each = wrapped(), scaler(2.0**26)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / small)
        data, before = torch.Generator().manual_seed(dist.get_rank()), flat(model)
        with tacit.attach(model, optimizer, algorithm, scaler=each):
            for _ in range(5):
                optimizer.zero_grad()
                x = torch.randn(8, 20, generator=data)
                y = torch.randint(0, 5, (8,), generator=data)
                each.scale(small * nn.functional.cross_entropy(model(x), y)).backward()
                each.step(optimizer)
                each.update()
        return flat(model) - before

    ddp = moved("ddp")
    phases = tacit.Scheduled(((2, tacit.FP16()),), tacit.FP16())
    for algorithm in ("fp16", tacit.Strategy(compressor=phases)):
        close_to(moved(algorithm), ddp, 1e-3 * float(ddp.abs().max()))


BY_NODE = [
    tacit.Strategy(compressor=compressor, topology=tacit.Hierarchical(by=by))
    for compressor in (tacit.Dense(), tacit.ErrorFeedback(tacit.TopK(ratio=0.1)))
    for by in ("slices", "leaders")
]


@check
def a_void_round_keeps_nothing_and_lowers_the_factor_on_all_ranks() -> None:
    every = ("dense", "bf16", "topk:ratio=0.1", "sign", "randomk", "powersgd", *BY_NODE)
    for algorithm in here(every, ("dense", "topk:ratio=0.1", "powersgd", BY_NODE[-1])):
        loop = Loop(scaler(), overflows={4: (1,)})
        with tacit.attach(loop.model, loop.optimizer, algorithm, scaler=loop.scaler) as session:
            loop.steps(4)  # and the buckets have settled
            before = {k: v.tensor.clone() for k, v in session.session.store.named_state().items()}
            parameters = flat(loop.model)
            loop.steps(1)
            after = session.session.store.named_state()
            assert all(torch.equal(before[k], after[k].tensor) for k in before), algorithm
            assert torch.equal(parameters, flat(loop.model)), algorithm
            assert loop.scaler.get_scale() == 2.0**15, algorithm
            assert session.metrics()["void_rounds"] == 1
            assert session.session.stats.records[-1].skipped
            assert session.metrics()["rounds"] == session.metrics()["steps"] == 5
            loop.steps(2)
        assert same_on_all_ranks(flat(loop.model)), algorithm


@check
def the_first_rounds_may_all_be_void() -> None:
    """In them the buckets settle on the buckets of DDP."""
    loop = Loop(scaler(), overflows={0: (0,), 1: (1,), 2: (2,), 3: (3,)})
    with tacit.attach(loop.model, loop.optimizer, "topk:ratio=1.0", scaler=loop.scaler):
        loop.steps(8)
    plain = Loop(scaler(), overflows=loop.overflows)
    plain.steps(8)
    close_to(flat(loop.model), flat(plain.model))


@check
def replicas_that_pass_over_steps_meet_all_the_same() -> None:
    """One rank overflows between rounds, another in the step that a round follows."""
    rank = dist.get_rank()
    loop = Loop(scaler(), overflows={1: (1,), 2: (1, 2), 7: (3,)})
    with tacit.attach(loop.model, loop.optimizer, "localsgd:sync_every=4", scaler=loop.scaler) as session:
        loop.steps(3)
        # The factor is each replica's own.
        assert loop.scaler.get_scale() == 2.0 ** {0: 16, 1: 14, 2: 15, 3: 16}[rank]
        loop.steps(1)
        assert same_on_all_ranks(flat(loop.model))
        loop.steps(3)
        assert not same_on_all_ranks(flat(loop.model))
        mean = torch.stack(everywhere(flat(loop.model))).mean(0)
        loop.steps(1)
        assert same_on_all_ranks(flat(loop.model))
        close_to(flat(loop.model), mean)  # nobody took that step
        assert loop.scaler.get_scale() == 2.0 ** {0: 15, 1: 13, 2: 14, 3: 15}[rank]
        loop.steps(6)
        assert session.metrics()["steps"] == 14
        assert session.metrics()["rounds"] == 3
    # Plain DDP goes on with it, and adds up what was scaled alike.
    assert loop.scaler.get_scale() == 2.0**13
    loop.steps(2)
    assert same_on_all_ranks(flat(loop.model))


@check
def a_step_that_nobody_foresaw_to_be_passed_over_delays_the_round() -> None:
    model, other = wrapped(), nn.Linear(20, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.05)
    each = scaler()
    x, y = torch.randn(8, 20), torch.zeros(8, dtype=torch.long)
    with tacit.attach(model, optimizer, "localsgd:sync_every=2", scaler=each) as session:
        for step in range(6):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x) + other(x), y)
            each.scale(loss).backward()
            if step == 1 and dist.get_rank() == 2:
                next(other.parameters()).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
            each.step(optimizer)
            each.update()
        assert session.metrics()["rounds"] == 3
    assert same_on_all_ranks(flat(model))


@check
def scaled_levels_overflow_on_one_node() -> None:
    loop = Loop(scaler(), overflows={1: (3,), 3: (0,)})
    rank = dist.get_rank()
    with tacit.attach(loop.model, loop.optimizer, "ednncomm:sync_every=4", scaler=loop.scaler) as session:
        loop.steps(3)
        replicas = everywhere(flat(loop.model))
        assert torch.equal(replicas[rank], replicas[rank ^ 1])
        assert loop.scaler.get_scale() == 2.0 ** (16 if rank < 2 else 15)
        loop.steps(1)
        assert same_on_all_ranks(flat(loop.model))
        assert loop.scaler.get_scale() == 2.0 ** (15 if rank < 2 else 14)
        loop.steps(5)
        assert session.metrics()["rounds_1"] == 2
    assert same_on_all_ranks(flat(loop.model))


@check
def a_scaled_run_that_is_resumed_is_the_run_that_never_stopped() -> None:
    overflows = {1: (1,), 3: (2,), 8: (0,)}
    late = "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=3"
    for algorithm in ("topk:ratio=0.1", "localsgd:sync_every=4", "ednncomm:sync_every=4", late, "odsgd"):
        never = Loop(scaler(growth_interval=2), overflows)
        with tacit.attach(never.model, never.optimizer, algorithm, scaler=never.scaler) as session:
            never.steps(6)
            again = Loop(scaler(), overflows)
            again.model.module.load_state_dict(never.model.module.state_dict())
            again.optimizer.load_state_dict(copy.deepcopy(never.optimizer.state_dict()))
            again.scaler.load_state_dict(never.scaler.state_dict())
            again.done = never.done
            again.data.set_state(never.data.get_state())
            saved = session.state_dict()
            never.steps(5)
        with tacit.attach(again.model, again.optimizer, algorithm, scaler=again.scaler) as session:
            session.load_state_dict(saved)
            again.steps(5)
        assert torch.equal(flat(never.model), flat(again.model)), algorithm
        assert never.scaler.state_dict() == again.scaler.state_dict()


@check
def a_bare_hook_takes_a_scaler() -> None:
    ends = []
    for algorithm in (None, "dense", "topk:ratio=1.0"):
        loop = Loop(scaler(), OVERFLOWS)
        if algorithm is None:
            loop.steps(8)
        else:
            with tacit.CommState(loop.model, algorithm, scaler=loop.scaler) as state:
                loop.model.register_comm_hook(state, tacit.comm_hook)
                loop.steps(8)
                assert state.metrics()["void_rounds"] == len(OVERFLOWS)
                assert state.metrics()["steps"] == 8
        ends.append(flat(loop.model))
    close_to(ends[1], ends[0])
    close_to(ends[2], ends[0])


@check
def two_optimizers_pass_over_a_step_together() -> None:
    model = wrapped()
    halves = [
        sgd(nn.ParameterList(part)) for part in (list(model.parameters())[:2], list(model.parameters())[2:])
    ]
    each, x = scaler(), torch.randn(8, 20)
    with tacit.attach(model, halves, "topk:ratio=0.1", scaler=each):
        for step in range(4):
            before = flat(model)
            if step == 2:
                poison(model, (1,))
            for half in halves:
                half.zero_grad()
            each.scale(model(x).square().mean()).backward()
            for half in halves:
                each.step(half)
            each.update()
            assert torch.equal(before, flat(model)) == (step == 2)
    assert same_on_all_ranks(flat(model))


@check
def without_the_scaler_an_infinity_is_an_error_that_tells_of_it() -> None:
    for algorithm in ("topk", "dense"):
        loop = Loop(scaler(), overflows={0: (1,)})

        def train(loop: Loop = loop, algorithm: str = algorithm) -> None:
            with tacit.attach(loop.model, loop.optimizer, algorithm):
                loop.steps(1)

        raises(tacit.NonFinite, train, "write attach(..., scaler=scaler)")


@check
def a_scaler_that_does_not_fit_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, optimizer, "dense", scaler=65536.0),  # type: ignore[arg-type]
        "scaler=65536.0 is no torch.amp.GradScaler",
    )
    mine = scaler(2.0 ** (9 if dist.get_rank() == 3 else 8))
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, optimizer, "dense", scaler=mine),
        "ranks [3] attach another scaler",
    )
    given = scaler() if dist.get_rank() == 3 else None
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, optimizer, "localsgd", scaler=given),
        "ranks [3] attach another scaler",
    )


@check
def groups_and_schedules_are_those_of_ddp() -> None:
    """Each group has its own learning rate and schedule, and a frozen layer is thawed on the way."""
    found = []
    for algorithm in ("ddp", "dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        model = wrapped()
        first, second, last = (list(model.module[i].parameters()) for i in (0, 2, 4))
        optimizer = torch.optim.SGD([{"params": last, "lr": 0.1}, {"params": second}], lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1 + n])
        with tacit.attach(model, optimizer, algorithm):
            train(model, optimizer, 3, after=schedule.step)
            before = first[0].detach().clone()
            optimizer.add_param_group({"params": first, "lr": 0.05, "initial_lr": 0.05})
            train(model, optimizer, 3)
            assert not torch.equal(before, first[0])
        assert same_on_all_ranks(flat(model)), algorithm
        found.append(flat(model))
    for each in found[1:]:
        close_to(each, found[0])


@check
def compressed_and_periodic_gradients_accumulate() -> None:
    ddp = trained("ddp", micro=3)
    for algorithm in ("topk:ratio=1.0", "localsgd:sync_every=1", "powersgd:rank=2", "localsgd:sync_every=3"):
        there = trained(algorithm, micro=3)
        if algorithm.endswith(("ratio=1.0", "every=1")):
            close_to(there, ddp)


@check
def a_static_graph_works() -> None:
    found = []
    for algorithm in ("ddp", "dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        model = wrapped(static_graph=True)
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 6)
        found.append(flat(model))
    for each in found[1:]:
        close_to(each, found[0])


@check
def parameters_that_ddp_ignores_are_left_alone() -> None:
    for algorithm in ("dense", "topk:ratio=0.1", "localsgd:sync_every=1"):
        module = network()
        DDP._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
        model = wrapped(module)
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 4)
            assert same_on_all_ranks(module[0].weight)
            assert not same_on_all_ranks(module[2].weight)


@check
def thawing_or_freezing_on_the_way_is_refused_before_a_step() -> None:
    for algorithm in ("topk", "localsgd:sync_every=1"):
        for begins, says in (
            (False, "2.bias was frozen when the session began and is trained now"),
            (True, "2.bias was trained when the session began and is frozen now"),
        ):
            module = network()
            module[2].bias.requires_grad_(begins)
            model = wrapped(module)
            optimizer = sgd(model)
            optimizer.register_step_pre_hook(lambda *_: dist.barrier())  # so that each rank gets there
            before = []

            def flipped(
                model: DDP = model,
                optimizer: torch.optim.SGD = optimizer,
                begins: bool = begins,
                algorithm: str = algorithm,
                before: list[Tensor] = before,
            ) -> None:
                with tacit.attach(model, optimizer, algorithm):
                    steps(model, optimizer, 2)
                    before.append(flat(model))
                    model.module[2].bias.requires_grad_(not begins)
                    steps(model, optimizer, 1)

            raises(tacit.AttachError, flipped, says)
            assert torch.equal(before[0], flat(model))


@check
def a_layer_may_be_frozen_on_the_way_where_ddp_looks_for_unused_parameters() -> None:
    found = []
    for algorithm in ("ddp", "dense", "topk:ratio=1.0", "localsgd:sync_every=1"):
        model = wrapped(find_unused_parameters=True)
        optimizer = sgd(model, momentum=0.0)
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 4)
            model.module[2].requires_grad_(False)
            steps(model, optimizer, 4)
        found.append(flat(model))
    for each in found[1:]:
        close_to(each, found[0])


@check
def requires_grad_changed_between_wrapping_and_attaching_is_refused() -> None:
    for begins, says in (
        (False, "2.bias was unfrozen after the model had been wrapped"),
        (True, "a parameter of shape (400,) was frozen after the model had been wrapped"),
    ):
        module = network()
        module[2].bias.requires_grad_(begins)
        model = wrapped(module, find_unused_parameters=True)
        module[2].bias.requires_grad_(not begins)

        def train(model: DDP = model) -> None:
            optimizer = sgd(model)
            with tacit.attach(model, optimizer, "topk"):
                steps(model, optimizer, 1)

        raises(tacit.TacitError, train, says)  # some see it in DDP's buckets, others that these have left


# ---- ranks that count for more than others ------------------------------------------------------------


@check
def a_rank_counts_for_its_weight() -> None:
    """Every fourth step the replicas are at the weighted mean of what each has come to by itself."""
    weights = [1.0 + rank for rank in range(dist.get_world_size())]
    model, alone = wrapped(), network()
    optimizer, own = sgd(model), sgd(alone)
    with tacit.attach(model, optimizer, "localsgd:sync_every=4", weight=10 * weights[dist.get_rank()]):
        for seed in range(3):
            steps(model, optimizer, 4, seed=seed)
            steps(alone, own, 4, seed=seed)
            mean = torch.zeros_like(flat(alone))
            for weight, each in zip(weights, everywhere(flat(alone)), strict=True):
                mean.add_(each, alpha=weight / sum(weights))
            close_to(flat(model), mean)
            assert same_on_all_ranks(flat(model))
            nn.utils.vector_to_parameters(mean, alone.parameters())


@check
def a_rank_counts_for_its_weight_in_means_of_gradients() -> None:
    """Of all ranks, and of a node's: with a mean of the nodes in each step, what both are is the same."""
    weight = 1.0 + dist.get_rank()
    share = weight / 2.5
    model = wrapped()
    for p in model.parameters():
        p.register_hook(lambda g: g * share)
    steps(model, sgd(model, momentum=0.0), 6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("net", "node"))
    for algorithm in (
        "postlocal:start_step=9",
        "snoo:sync_every=9,outer_lr=1,outer_momentum=0",
        "ednncomm:sync_every=1",
    ):
        weighed = wrapped()
        optimizer = sgd(weighed, momentum=0.0)
        with tacit.attach(weighed, optimizer, algorithm, weight=10 * weight, mesh=mesh):
            steps(weighed, optimizer, 6)
        close_to(flat(weighed), flat(model))


@check
def a_weight_that_cannot_be_is_refused() -> None:
    model = wrapped()
    optimizer = sgd(model)

    def attach(algorithm: str, weight: float | None) -> Callable[[], object]:
        return lambda: tacit.attach(model, optimizer, algorithm, weight=weight)

    raises(tacit.AttachError, attach("topk", 2.0), "weight=2.0 is for strategies that average replicas")
    raises(tacit.AttachError, attach("predictive", 2.0), "what a replica keeps for itself is not weighed")
    for mixing in ("gossip", "sgp", "prague", "choco", "dcd", "noloco"):
        raises(tacit.AttachError, attach(mixing, 2.0), "as each replica mixes with a few others")
    for weight in (0.0, -1.0, math.nan, math.inf):
        raises(tacit.AttachError, attach("localsgd", weight), "write a number above 0")
    mine = 2.0 if dist.get_rank() else None
    raises(tacit.AttachError, attach("localsgd", mine), "ranks [0] give no weight, and others do")


if __name__ == "__main__":
    CHECKS.run()
