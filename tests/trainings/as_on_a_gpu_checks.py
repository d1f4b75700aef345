"""Checks of the other scripts, on models on the CPU that are exchanged as those on a GPU are; each kind once.

Left out, as it is known to be different there:

* `the_bytes_are_those_of_the_formula`, `not_told_four_ranks_send_bytes_in_two_phases`: ranks tell each other
  of an overflow too, by a few more numbers;
* `a_nan_is_told_with_where_it_began_and_not_where_it_came_to`: parameters are not looked up at once.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import auto_checks
import daso_checks
import delayed_checks
import gloo_checks
import layerwise_checks
import localsgd_checks
import replica_checks
import three_rank_checks
import torch
import torch.distributed as dist
import training_loop_checks
from made_gpu import made_gpu
from rank_training import Checks, flat, raises, same_on_all_ranks, sgd, steps, wrapped
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.errors import NonFinite
from tacit.session.health.device_notes import DeviceReport

IN_STREAM = "on the GPU in stream order"
CHOSEN = {
    auto_checks: """
        from_the_choice_on_it_is_the_chosen_strategy_bit_for_bit
    """,
    gloo_checks: """
        dense_is_ddp
        dense_is_ddp_with_accumulated_gradients
        votes_move_every_entry_by_the_learning_rate
        post_local_sgd_is_synchronous_up_to_its_step
        a_variance_that_is_kept_is_given_back_or_refused
        late_answers_land_on_all_ranks_alike
        lots_settle_on_the_buckets_of_ddp
        frozen_shared_and_unused_parameters_work
        buffers_are_left_alone_between_rounds_and_averaged_in_them
        by_node_what_ranks_keep_follows_its_parameters
        what_one_node_knows_all_are_told
        every_level_has_its_state_in_a_checkpoint
        parameters_without_elements_and_of_two_types_work
        an_infinity_on_one_rank_stops_all_by_name
        numbers_of_a_session
    """,
    training_loop_checks: """
        a_void_round_keeps_nothing_and_lowers_the_factor_on_all_ranks
        replicas_that_pass_over_steps_meet_all_the_same
        scaled_levels_overflow_on_one_node
        two_optimizers_pass_over_a_step_together
        a_rank_counts_for_its_weight
    """,
    delayed_checks: """
        gradients_accumulate_without_sync
        a_checkpoint_holds_the_mean_that_is_under_way
        closing_drops_the_last_mean_and_sync_changes_nothing
        what_is_not_finite_is_told_a_step_later_of_the_step_it_is_of
        the_bare_hook_is_late_too
    """,
    replica_checks: """
        parameters_that_are_given_other_memory_are_found_there
        buffers_of_all_kinds_meet
        a_buffer_that_becomes_nan_on_one_rank_is_named_on_all
        a_loss_that_is_nan_may_have_begun_anywhere
    """,
    localsgd_checks: """
        what_is_local_differs_between_rounds_and_what_is_averaged_is_equal_to_the_bit
        late_answers_in_fragments_average_momentum_when_they_land
        where_a_rank_has_no_momentum_yet_all_keep_their_own
    """,
    layerwise_checks: """
        training_is_that_of_ddp
        accumulation_is_exchanged_once
        a_step_has_the_options_of_its_own_time
        two_optimizers_step_in_turn
        what_is_saved_behind_a_step_has_taken_it
        a_resumed_run_goes_on
        a_gradient_that_is_under_way_cannot_be_looked_at
        steps_left_out_leave_no_gradient
    """,
    daso_checks: """
        daso_keeps_node_mates_equal_and_ends_every_epoch_with_equal_replicas
        daso_takes_turns
        daso_tells_all_ranks_of_a_nan
    """,
}

TWO_BY_TWO = (2, 2)
CHECKS = Checks()
check = CHECKS.add


@check
def auto_chooses_by_the_gpus_clock() -> None:
    """Over a slow wire what sends little; over a fast one plain DDP, as every launch costs the host time."""
    for wire, mesh in ((1e4, TWO_BY_TWO), (1e15, None)):
        with made_gpu(wire):
            model = wrapped()
            optimizer = sgd(model)
            nodes = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("net", "node"))
            with tacit.attach(model, optimizer, "auto", mesh=nodes) as session:
                steps(model, optimizer, 14)
                choice = session.choice
                assert choice is not None
                seconds = dict(choice.considered)
                if wire < 1e6:
                    assert choice.seconds < 0.5 * (seconds["ddp"] or 0.0), choice
                    assert "dense" not in choice.algorithm
                else:
                    assert choice.algorithm == "ddp", choice
                steps(model, optimizer, 2)
        assert same_on_all_ranks(flat(model))


@check
def a_diagnosis_on_a_gpu_predicts_what_would_be_faster() -> None:
    with made_gpu(1e4):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, "dense") as session:
            found = session.diagnose(steps=3)
            steps(model, optimizer, 9)
    assert found.result is not None
    kinds = [each.kind for each in found.result.findings]
    assert "links" in kinds, found.result
    (links,) = [each for each in found.result.findings if each.kind == "links"]
    assert "attach(model, optimizer, " in links.advice
    # Nobody waits for the made wire, and no more is promised than was waited.
    assert 0 < links.seconds <= found.result.seconds - found.result.limit + 1e-9
    assert found.result.notes == ()


@check
def a_run_is_resumed_bit_for_bit() -> None:
    folder = Path(sys.argv[1])
    for algorithm in (
        "topk:ratio=0.1",
        "powersgd",
        gloo_checks.STREAMING,
        gloo_checks.BY_NODE["sparse slices"],
    ):
        never, stopped = gloo_checks.resumed(algorithm, 6, 5, folder)
        assert torch.equal(never, stopped), algorithm


@check
def in_stream_and_on_the_host_bits_are_the_same() -> None:
    def there(algorithm: str, where: str | None) -> Tensor:
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm, exchange_on=where) as session:  # type: ignore[arg-type]
            assert (IN_STREAM in session.active_path) == (where != "host")
            steps(model, optimizer, 6)
        return flat(model)

    # One of each way to the GPU's stream; tests/exchange/test_stream_order.py has all others.
    for algorithm in (
        "powersgd",
        "efsign",
        "pipesgd",
        "diloco:sync_every=3,bits=4",
        "diloco:sync_every=3,anchor_bits=16",
        "lowbit:bits=2,entropy=true,anchor_bits=16",
        "topk:ratio=0.1,entropy=true",
        "lag:xi=30",
        "qsr:sync_every=2,bits=4",
        "gossip:graph=ring",
        "sgp:late=1",
        "wagma:global_every=3",
        "choco",
        "noloco:sync_every=2",
        "gtopk:ratio=0.1",
        "uneven:rates=1000/1000/1000/100",
    ):
        assert torch.equal(there(algorithm, None), there(algorithm, "host")), algorithm


@check
def a_nan_of_one_is_told_to_all_where_answers_differ() -> None:
    for algorithm in ("gossip:graph=ring", "wagma", "choco"):
        model = wrapped()
        optimizer = sgd(model)

        def train(model: DDP, optimizer: torch.optim.Optimizer, algorithm: str) -> None:
            with tacit.attach(model, optimizer, algorithm) as session:
                assert IN_STREAM in session.active_path
                steps(model, optimizer, 3)
                if dist.get_rank() == 2:
                    model.module[2].weight.register_hook(lambda gradient: gradient * float("nan"))
                steps(model, optimizer, 3)

        raises(NonFinite, partial(train, model, optimizer, algorithm), "on rank 2")


@check
def a_nan_is_told_behind_steps_that_are_put_off() -> None:
    for algorithm in layerwise_checks.FEW:
        model, optimizer, session = layerwise_checks.planned(algorithm)
        assert IN_STREAM in session.active_path
        x = torch.full((8, 20), float("nan") if dist.get_rank() == 1 else 1.0)

        def step(
            model: DDP = model,
            x: Tensor = x,
            optimizer: torch.optim.Optimizer = optimizer,
            session: tacit.Attached = session,
        ) -> None:
            torch.nn.functional.cross_entropy(model(x), torch.zeros(8, dtype=torch.long)).backward()
            optimizer.step()
            session.flush()

        raises(NonFinite, step, "rank 1")
        session.close()


@check
def a_discarded_step_leaves_no_trace() -> None:
    with patch(
        "three_rank_checks.DISCARDED",
        ("topk:ratio=0.1,topology=two-phase", "onebit-adam:freeze_step=2,refresh=1"),
    ):
        three_rank_checks.a_discarded_step_leaves_no_trace()


@check
def ranks_that_exchange_elsewhere_are_told() -> None:
    model = wrapped()
    mine = "host" if dist.get_rank() == 1 else None
    raises(
        tacit.AttachError,
        lambda: tacit.attach(model, sgd(model), "topk", exchange_on=mine),  # type: ignore[arg-type]
        "ranks [1] attach another exchange_on than rank 0",
    )


@check
def a_nan_is_told_to_all_where_one_device_is_ahead() -> None:
    """Only the first rank's device has run a round when its host looks."""
    model = wrapped()
    optimizer = sgd(model)
    algorithm = "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=3"

    def train() -> None:
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 5)
            if dist.get_rank() == 1:
                model.module[4].weight.register_hook(lambda gradient: gradient * float("nan"))
            steps(model, optimizer, 12)

    with patch.object(DeviceReport, "done", property(lambda self: dist.get_rank() == 0)):
        raises(NonFinite, train, "on rank 1, in step 5")


def noting(name: str, function: Callable[[], None]) -> Callable[[], None]:
    """The check, which says where the sessions that it attached have run."""

    def noted() -> None:
        paths: list[str] = []
        attach = tacit.attach

        def attached(*given: object, **options: object) -> object:
            session = attach(*given, **options)  # type: ignore[arg-type]
            paths.append(session.active_path)
            return session

        tacit.attach = attached  # type: ignore[assignment]
        try:
            function()
        finally:
            tacit.attach = attach
            print(json.dumps({"check": f"where {name} ran", "error": None, "paths": paths}), flush=True)

    return noted


for module, names in CHOSEN.items():
    for name in names.split():
        CHECKS[name] = noting(name, module.CHECKS[name])

if __name__ == "__main__":
    # Here a host waits inside a collective whose peers are gone, until its time-out. NCCL's is given up.
    with patch("tacit.transports.torch_distributed.LATER", timedelta(seconds=5)):
        CHECKS.run(sys.argv[2:])
