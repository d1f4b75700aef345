"""The service that keeps the parameters, under every order of messages that hypothesis finds."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_service import BACK, ENTER, PIECE, N, World, one, push
from torch import Tensor

from tacit.compressors import QSGD, Dense, Int8, Sign, TopK
from tacit.contracts import Context, OneShot, PayloadSpec
from tacit.errors import PayloadError, ServerLost
from tacit.stores.messages import Message, MessageSpec, RunSpec
from tacit.stores.protocol import FrameKind
from tacit.stores.server.optimizers import ServerAdam, ServerSGD
from tacit.stores.server.parameter_service import ParameterService
from tacit.stores.server.payloads import BufferWorkspace
from tacit.stores.server.services import service_for
from tacit.topologies import Asynchronous, DelayedNesterov, StaleSynchronous, Star, Synchronous

WORKERS = 3
CONSISTENCIES = [
    Asynchronous(),
    StaleSynchronous(0),
    StaleSynchronous(2),
    Synchronous(backup_workers=1),
    Synchronous(backup_workers=2),
]


def keeper(
    consistency, workers: int = WORKERS, rule=None, back: PayloadSpec = BACK, **options
) -> ParameterService:
    optimizer = "worker" if rule is None else "server"
    return ParameterService(workers, Star(consistency, optimizer=optimizer, **options), back, rule, "bucket")


orders = st.lists(
    st.tuples(st.sampled_from(["go", "go", "go", "kill", "return"]), st.integers(0, WORKERS - 1))
)


def play(world: World, order: list[tuple[str, int]], bound: int | None = None) -> None:
    """Take these steps, where they can be taken; a worker that waits for an answer does nothing."""
    for i in range(WORKERS):
        world.enter(i)
    for what, i in order:
        worker = world.workers[i]
        if what == "kill" and worker.alive and sum(w.alive for w in world.workers) > 1:
            world.kill(i)
        elif what == "return" and not worker.alive:
            world.enter(i)
        elif what == "go" and worker.alive and not worker.busy:
            world.push(i, one(i))
            if bound is not None and not worker.busy:
                alive = [w.clock for w in world.workers if w.alive]
                assert worker.clock - min(alive) <= bound


@pytest.mark.parametrize("consistency", CONSISTENCIES[:3], ids=str)
@settings(deadline=None)
@given(order=orders)
def test_no_update_is_lost_or_applied_twice(consistency, order) -> None:
    world = World(keeper(consistency), WORKERS)
    play(world, order, getattr(consistency, "bound", None))
    pushes = torch.tensor([w.pushed for w in world.workers] + [0.0] * (N - WORKERS))
    assert torch.allclose(world.state.x, pushes / WORKERS)
    assert world.state.version == pushes.sum()
    assert sum(world.state.stale.values()) == pushes.sum()
    assert not any(w.refused for w in world.workers)


@pytest.mark.parametrize("consistency", CONSISTENCIES[3:], ids=str)
@settings(deadline=None)
@given(order=orders)
def test_every_push_is_in_one_round_or_dropped_as_late(consistency, order) -> None:
    world = World(keeper(consistency), WORKERS)
    play(world, order)
    pushed = sum(w.pushed for w in world.workers)
    counted = sum(world.state.stale.values())
    assert counted + world.state.late + len(world.state.pushed) == pushed
    # A round moves the parameters by one push in the mean, whoever took part.
    assert torch.allclose(world.state.x.sum(), torch.tensor(float(world.state.version)))


@pytest.mark.parametrize("delay", [None, 1, 2, 5])
@settings(deadline=None)
@given(order=orders)
def test_delayed_nesterov_is_the_papers(delay: int | None, order) -> None:
    """Algorithm 3 of arXiv 2401.09135 in its own symbols, whoever pushes, dies and comes back."""
    star = Star(Asynchronous(), outer=DelayedNesterov(0.7, 0.9, delay))
    world = World(service_for(RunSpec(star, (), ()), WORKERS, MessageSpec("a/0", (), (), BACK)), WORKERS)
    pushed, push_ = list[int](), world.push

    def noted(i: int, x: Tensor) -> None:
        pushed.append(i)
        push_(i, x)

    world.push = noted  # type: ignore[method-assign]
    play(world, order)
    n, lr, beta = delay or WORKERS, 0.7, 0.9
    theta, m, buffer = (torch.zeros(N, dtype=torch.float64) for _ in range(3))
    for t, worker in enumerate(pushed):
        delta = -one(worker).double()
        buffer += delta
        if (t + 1) % n == 0:
            m = beta * m + buffer / n
            theta -= lr * (delta / n + beta * m)
            buffer.zero_()
        else:
            theta -= lr * delta / n
    torch.testing.assert_close(world.state.x.double(), theta, rtol=1e-5, atol=1e-6)
    again = world.service.load(world.service.save(world.state))
    assert all(torch.equal(each, again.optimizer[name]) for name, each in world.state.optimizer.items())


@settings(deadline=None)
@given(order=orders, consistency=st.sampled_from(CONSISTENCIES))
def test_the_same_order_gives_the_same_bits(order, consistency) -> None:
    runs = []
    for _ in range(2):
        world = World(keeper(consistency), WORKERS)
        play(world, order)
        runs.append((world.order, world.state.x))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_nobody_goes_further_ahead_than_the_bound_and_all_go_on_when_the_slowest_does() -> None:
    world = World(keeper(StaleSynchronous(2)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    for _ in range(2):
        world.push(0, one(0))
        assert not world.workers[0].busy
    world.push(0, one(0))
    assert world.workers[0].busy, "three ahead of the others"
    world.push(1, one(1))
    assert world.workers[0].busy, "rank 2 has not moved"
    world.push(2, one(2))
    assert not world.workers[0].busy


def test_the_slowest_is_killed_and_the_others_go_on() -> None:
    world = World(keeper(StaleSynchronous(0)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.push(0, one(0))
    world.push(1, one(1))
    assert world.workers[0].busy
    world.kill(2)
    assert not world.workers[0].busy
    world.push(0, one(0))
    world.push(1, one(1))
    world.enter(2)
    assert world.workers[2].clock == 2, "it does not have to catch up"
    assert torch.equal(world.workers[2].has, world.state.x)


def test_staleness_is_what_others_have_applied_since_the_pull() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.push(0, one(0))
    world.push(0, one(0))
    world.push(1, one(1))
    assert world.state.stale == {0: 2, 2: 1}
    assert (world.workers[0].stale, world.workers[1].stale) == ([0, 0], [2])


def test_only_the_first_brings_the_parameters() -> None:
    world = World(keeper(Asynchronous()), WORKERS, start=torch.full((N,), 5.0))
    service, asked = world.service, []
    state = world.state
    for i in range(2):
        replies, state = service.on(world.workers[i].sender._replace(incarnation=1), ENTER, state)
        asked.append([reply.offer for reply in replies])
    assert asked == [[True], []]


def test_who_was_to_bring_them_dies_and_the_next_one_is_asked() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    first = world.workers[0]
    first.incarnation, first.alive, first.busy = 1, False, True  # it is asked, and never hears of it
    _, world.state = world.service.on(first.sender, ENTER, world.state)
    world.enter(1)
    assert world.workers[1].busy
    world.kill(0)
    assert torch.equal(world.workers[1].has, world.start)


def test_all_meet_with_equal_parameters() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
        world.push(i, one(i))
    world.meet(0)
    world.meet(1)
    world.push(2, one(2))
    assert world.workers[0].busy
    world.meet(2)
    for worker in world.workers:
        assert not worker.busy
        assert torch.equal(worker.has, world.state.x)


def test_a_dead_worker_is_not_waited_for_at_a_meeting() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.meet(0)
    world.meet(1)
    world.kill(2)
    assert not world.workers[0].busy


@pytest.mark.parametrize(
    ("sequence", "kind", "says"),
    [
        (1, PayloadError, "has pushed step 1, and its next is step 2"),
        (3, PayloadError, "has pushed step 3, and its next is step 2"),
    ],
)
def test_a_push_of_the_wrong_step_changes_nothing(sequence, kind, says) -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    world.enter(0)
    world.push(0, one(0))
    before = world.state.x.clone()
    (reply,), after = world.service.on(world.workers[0].sender, push(one(0), sequence=sequence), world.state)
    assert isinstance(reply.refused, kind)
    assert says in str(reply.refused)
    assert torch.equal(after.x, before)
    assert after == world.state


def test_a_push_of_the_wrong_shape_or_type_changes_nothing() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    world.enter(0)
    bad = [
        Message(FrameKind.PUSH, 1, ((torch.ones(N + 1),),), (PIECE,), (BACK,)),
        Message(FrameKind.PUSH, 1, ((torch.ones(N, dtype=torch.float64),),), (PIECE,), (BACK,)),
        Message(FrameKind.PUSH, 1, ((torch.ones(N + 1),),), (BACK,), (BACK,)),
        Message(FrameKind.PUSH, 1, ((torch.ones(N),), (torch.ones(N),)), (PIECE,), (BACK,)),
    ]
    for each in bad:
        before = world.state.x.clone()
        (reply,), after = world.service.on(world.workers[0].sender, each, world.state)
        assert isinstance(reply.refused, PayloadError)
        assert torch.equal(after.x, before)


def test_a_process_of_which_others_are_told_that_it_is_gone_is_refused() -> None:
    world = World(keeper(Asynchronous()), WORKERS)
    world.enter(0)
    ghost = world.workers[0].sender
    world.kill(0)
    (reply,), _ = world.service.on(ghost, push(one(0)), world.state)
    assert isinstance(reply.refused, ServerLost)
    assert "attach again to come back" in str(reply.refused)
    world.enter(0)
    (reply,), _ = world.service.on(ghost, push(one(0)), world.state)
    assert isinstance(reply.refused, ServerLost), "its first life is over"


def test_with_too_few_workers_left_a_round_is_refused_with_the_names() -> None:
    world = World(keeper(Synchronous(backup_workers=1)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.push(0, one(0))
    world.kill(1)
    assert world.workers[0].busy
    world.kill(2)
    (error,) = world.workers[0].refused
    assert "rank 1 is gone; rank 2 is gone: 1 workers are left, and a round takes 2" in str(error)


def test_a_round_does_not_wait_for_those_that_have_nothing_more_to_push() -> None:
    world = World(keeper(Synchronous(backup_workers=1)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.meet(0)
    world.meet(1)
    world.push(2, one(2))
    assert not world.workers[2].busy
    world.meet(2)
    assert not any(worker.busy for worker in world.workers)


def test_what_comes_late_is_dropped_and_answered_with_the_present_parameters() -> None:
    world = World(keeper(Synchronous(backup_workers=1)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    world.push(0, one(0))
    world.push(1, one(1))
    world.push(2, one(2))
    assert world.state.late == 1
    assert torch.equal(world.state.x, (one(0) + one(1)) / 2)
    assert torch.equal(world.workers[2].has, world.state.x)


def behind(rounds: int) -> World:
    """So many rounds without worker 2, which then pushes its first step, late."""
    world = World(keeper(Synchronous(backup_workers=1)), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    for _ in range(rounds):
        world.push(0, one(0))
        world.push(1, one(1))
    world.push(2, one(2))
    assert (world.state.version, world.state.late, world.workers[2].busy) == (rounds, 1, False)
    return world


def test_who_is_behind_waits_for_nobody_and_counts_all_the_same() -> None:
    """The others may wait for it elsewhere, in a collective, and push nothing before it comes there."""
    world = behind(2)
    before = world.state.x.clone()
    world.push(2, one(2))
    assert not world.workers[2].busy
    assert world.state.version == 2, "one of two that a round takes"
    world.push(2, one(2))
    assert world.workers[2].busy, "it is as far as all"
    world.push(0, one(0))
    assert torch.equal(world.state.x, before + (one(0) + one(2)) / 2)
    assert not any(worker.busy for worker in world.workers)


def test_of_who_is_far_behind_one_push_a_round_counts_and_the_others_are_late() -> None:
    world = behind(4)
    for _ in range(3):
        world.push(2, one(2))
        assert not world.workers[2].busy
    assert len(world.state.pushed) == 1
    assert sum(world.state.stale.values()) + world.state.late + 1 == sum(w.pushed for w in world.workers)
    world.push(0, one(0))
    assert torch.equal(world.state.x, (5 * one(0) + 4 * one(1) + one(2)) / 2)


def test_where_nobody_waits_nobody_is_missing() -> None:
    world = behind(2)
    world.push(2, one(2))
    assert world.state.pushed
    assert world.service.missing(world.state) == set(), "else they would be dropped as silent"
    world.push(2, one(2))
    assert world.service.missing(world.state) == {0, 1}


def test_who_comes_back_is_as_far_as_the_round() -> None:
    world = behind(3)
    world.kill(2)
    world.push(0, one(0))
    world.push(1, one(1))
    world.enter(2)
    assert world.workers[2].clock == world.state.version == 4
    world.push(2, one(2))
    assert world.workers[2].busy
    world.push(0, one(0))
    assert not world.workers[2].busy
    assert world.state.late == 1


# ---- what a push is worth -----------------------------------------------------------------------------


def test_a_stale_push_counts_less() -> None:
    world = World(keeper(Asynchronous(), by_staleness=True), WORKERS)
    for i in range(WORKERS):
        world.enter(i)
    for _ in range(4):
        world.push(0, one(0))
    world.push(1, one(1))
    assert torch.allclose(world.state.x, torch.tensor([4.0, 1 / 4, 0, 0, 0, 0]) / 3)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (ServerSGD(), lambda p: torch.optim.SGD(p, lr=0.1)),
        (
            ServerSGD(momentum=0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        ),
        (
            ServerSGD(momentum=0.9, dampening=0.5),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (ServerAdam(weight_decay=0.01), lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01)),
        (
            ServerAdam(weight_decay=0.01, decoupled=True),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
        ),
    ],
)
def test_the_servers_optimizer_is_torchs(rule, make) -> None:
    start = torch.linspace(-1, 1, N)
    theirs = torch.nn.Parameter(start.clone())
    optimizer = make([theirs])
    world = World(keeper(Asynchronous(), 1, rule), 1, start)
    world.enter(0)
    for step in range(5):
        g = torch.sin(torch.arange(N) + step).float()
        theirs.grad = g.clone()
        optimizer.step()
        world.workers[0].clock += 1
        world.workers[0].busy = True
        world.send(world.workers[0], push(g, 0.1, world.workers[0].clock))
    assert torch.allclose(world.workers[0].has, theirs.detach(), atol=1e-6)


def test_delay_compensation_is_the_papers() -> None:
    start = torch.linspace(0, 1, N)
    world = World(keeper(Asynchronous(), 2, ServerSGD(), compensation=0.5), 2, start)
    world.enter(0)
    world.enter(1)
    g = torch.linspace(1, 2, N)
    for i in (0, 1):
        worker = world.workers[i]
        worker.clock, worker.busy = 1, True
        world.send(worker, push(g, 0.1))
    x = start - 0.1 * g / 2  # the first is not stale: w - w_old is 0
    late = g + 0.5 * g * g * (x - start)
    assert torch.allclose(world.state.x, x - 0.1 * late / 2)


# ---- what comes back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [TopK(ratio=0.2), Sign(), QSGD(), Dense()], ids=str)
def test_of_what_comes_back_nothing_is_lost(codec) -> None:
    """Each answer says the difference to what the worker has, so that in the end it has everything."""
    world = World(keeper(Asynchronous(), 1, back=PayloadSpec(codec, N, torch.float32)), 1, torch.zeros(N))
    world.enter(0)
    has = world.workers[0].has.clone()
    generator = torch.Generator().manual_seed(0)
    for step in range(120):
        x = torch.randn(N, generator=generator) if step < 20 else torch.zeros(N)
        worker = world.workers[0]
        replies, world.state = world.service.on(worker.sender, push(x, sequence=step + 1), world.state)
        codec.decode_add_(replies[0].payloads[0], has, 1.0)
        assert torch.allclose(has, world.state.taken[0], atol=1e-5)
    assert (has - world.state.x).norm() < 0.05 * max(1.0, float(world.state.x.norm()))


def test_a_push_in_parts_is_put_together() -> None:
    """Of the spans of others the main compressor says nothing, though one bit cannot say zero."""
    main, beside = torch.tensor([1.0, 0, 0, -1.0, 1.0, -1.0]), torch.tensor([5.0, 7.0])
    work = BufferWorkspace()
    sign = Sign().encode(main, Context(out=main.clone(), work=work, peers=1))
    pieces = (
        PayloadSpec(Sign(), N, torch.float32),
        PayloadSpec(Dense(), 2, torch.float32, spans=((1, 3),)),
    )
    world = World(keeper(Asynchronous(), 1), 1, torch.zeros(N))
    world.enter(0)
    world.workers[0].busy, world.workers[0].clock = True, 1
    world.send(world.workers[0], Message(FrameKind.PUSH, 1, (sign, (beside,)), pieces, (BACK,)))
    said = torch.zeros(N)
    Sign().decode_(sign, said)
    said[1:3] = beside
    assert torch.allclose(world.state.x, said)


def test_a_restarted_server_goes_on_from_what_it_saved() -> None:
    service = keeper(StaleSynchronous(1), 2, ServerSGD(momentum=0.9))
    world = World(service, 2, torch.ones(N))
    world.enter(0)
    world.enter(1)
    for i in (0, 1, 0, 1):
        world.push(i, one(i))
    saved: dict[str, Tensor] = service.save(world.state)
    again = World(service, 2, torch.zeros(N))
    again.state = service.load(saved)
    again.enter(0)
    assert torch.equal(again.workers[0].has, world.state.x)
    assert again.workers[0].clock == 2
    assert torch.equal(again.state.optimizer["velocity"], world.state.optimizer["velocity"])


# ---- parameters of two bytes --------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)


def halves(dtype: torch.dtype, codec: OneShot | None = None, workers: int = 8, **options) -> World:
    """All stand at 1, where a unit in the last place is `eps`."""
    world = World(
        keeper(Asynchronous(), workers, back=PayloadSpec(codec, N, dtype), **options),
        workers,
        torch.ones(N, dtype=dtype),
    )
    for i in range(workers):
        world.enter(i)
    return world


def units(dtype: torch.dtype) -> Tensor:
    return torch.full((N,), torch.finfo(dtype).eps, dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_is_below_the_workers_type_adds_up(dtype) -> None:
    """Each push counts an eighth of a unit in the last place, which alone would be rounded away."""
    world = halves(dtype)
    for _, i in itertools.product(range(40), range(8)):
        world.push(i, units(dtype))
        assert world.workers[i].has.dtype == dtype
    assert torch.equal(world.state.x, 1 + 40 * units(dtype).float())
    for i in range(8):
        world.meet(i)
    assert all(torch.equal(worker.has, world.state.x.to(dtype)) for worker in world.workers)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_rounding_takes_away_from_an_answer_comes_with_a_later_one(dtype) -> None:
    """A worker adds answers of its own type to an anchor in fp32, and the server knows where that is."""
    codec, unit = Int8(), torch.finfo(dtype).eps
    world = halves(dtype, codec)
    has = [torch.ones(N) for _ in range(8)]
    for step, i in itertools.product(range(40), range(8)):
        message = push(units(dtype), sequence=step + 1)
        (reply,), world.state = world.service.on(world.workers[i].sender, message, world.state)
        said = torch.empty(N, dtype=dtype)
        codec.decode_(reply.payloads[0], said)
        has[i].add_(said)
        assert torch.equal(has[i], world.state.taken[i])
        assert (world.state.x - has[i]).abs().max() <= unit
    assert torch.equal(world.state.x, 1 + 40 * units(dtype).float())


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (ServerSGD(momentum=0.9), {}),
        (ServerSGD(), {"compensation": 0.5}),
        (ServerAdam(weight_decay=0.01, decoupled=True), {}),
    ],
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_server_steps_such_parameters_as_in_fp32(rule, options, dtype) -> None:
    worlds = [halves(each, workers=2, rule=rule, **options) for each in (dtype, torch.float32)]
    for step, i in itertools.product(range(40), range(2)):
        g = torch.sin(torch.arange(N) + step).to(dtype)
        for world in worlds:
            worker = world.workers[i]
            worker.clock, worker.busy = step + 1, True
            world.send(worker, push(g.to(world.start.dtype), 1e-4, step + 1))
            assert worker.has.dtype == world.start.dtype
    ours, theirs = (world.state.x for world in worlds)
    assert not torch.equal(ours, torch.ones(N))
    # To compensate, a server goes by what the worker has, which is rounded.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if options else 0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_such_parameters_are_saved_as_they_are_kept_and_older_states_load(dtype) -> None:
    world = halves(dtype, workers=2, rule=ServerSGD(momentum=0.9))
    for i in (0, 1, 0, 1):
        worker = world.workers[i]
        worker.clock, worker.busy = worker.clock + 1, True
        world.send(worker, push(units(dtype), 0.1, worker.clock))
    saved = world.service.save(world.state)
    loaded = world.service.load(saved)
    assert torch.equal(loaded.x, world.state.x)
    assert torch.equal(loaded.optimizer["velocity"], world.state.optimizer["velocity"])
    old = saved | {"x": saved["x"].to(dtype), "optimizer": saved["optimizer"] | {"velocity": units(dtype)}}
    again = World(world.service, 2, torch.zeros(N, dtype=dtype))
    again.state = world.service.load(old)
    assert again.state.x.dtype == again.state.optimizer["velocity"].dtype == torch.float32
    again.enter(0)
    assert torch.equal(again.workers[0].has, old["x"])
    again.push(0, units(dtype))
    assert not again.workers[0].refused
