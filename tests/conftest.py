"""What tests in several folders share, and which of them start processes."""

import _posixsubprocess
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: its threads would spin for what is small here

# A shell has its background jobs ignore it, and what they start: commands under test are to be interrupted.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

from forked_workers import Forks
from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed

# How the names of tests begin that start processes: a browser, ranks, a server, a command. No other test may
# start one, as each costs seconds for its imports alone.
PROCESSES = (
    "tests/api/test_comm_hook.py",
    "tests/attaching/test_agreement.py",
    "tests/attaching/test_arguments.py",
    "tests/attaching/test_left_unchanged.py",
    "tests/attaching/test_other_systems.py",
    "tests/benchmarks/test_blocks.py",
    "tests/benchmarks/test_fault_campaign.py::test_a_trial",
    "tests/benchmarks/test_gpu_checks.py::test_a_process",
    "tests/benchmarks/test_host_time.py",
    "tests/benchmarks/test_peers.py::test_a_call_that_fails",
    "tests/benchmarks/test_peers.py::test_memory_is_that_of_the_processes",
    "tests/benchmarks/test_peers.py::test_what_cannot_be_is_refused",
    "tests/checkpoint/test_resize.py::test_real_processes",
    "tests/cuda/",
    "tests/docs/test_code.py::test_a_block_runs",
    "tests/docs/test_code.py::test_a_script_runs",
    "tests/docs/test_code.py::test_a_killed_rank",
    "tests/docs/test_site.py",
    "tests/examples/test_examples.py",
    "tests/examples/test_launch_files.py",
    "tests/failure/test_exit_with_hanging_collective.py",
    "tests/failure/test_faulty_ranks.py",
    "tests/failure/test_rank_cut_off.py",
    "tests/failure/test_unclosed_sessions.py",
    "tests/failure/test_uneven_data.py",
    "tests/fsdp/test_sharded_models.py::test_on_gloo",
    "tests/fsdp/test_sharded_models.py::test_the_ranks",
    "tests/gradients/layerwise/test_layerwise.py",
    "tests/gradients/test_delayed.py",
    "tests/integrations/",
    "tests/kernels/test_dispatch.py",
    "tests/kernels/test_triton.py",
    "tests/lab/cli/test_churn.py",
    "tests/lab/cli/test_compare_in_process.py",
    "tests/lab/cli/test_compare_scripts.py",
    "tests/lab/cli/test_diagnose.py::test_a_script",
    "tests/lab/cli/test_full_disk.py",
    "tests/lab/cli/test_importing.py",
    "tests/lab/cli/test_main.py",
    "tests/lab/cli/test_plan.py::test_a_script",
    "tests/lab/cli/test_probe.py::test_links_are",
    "tests/lab/cli/test_restarted_servers.py",
    "tests/lab/cli/test_run.py",
    "tests/lab/cli/test_run_failures.py::test_the_summary_names_who_failed_first",
    "tests/lab/cli/test_server_secret.py",
    "tests/lab/cli/test_servers_by_command.py",
    "tests/lab/predictor_training/test_script_recording.py::test_a_script_in_processes",
    "tests/lab/profiling/test_recorder.py::test_a_profile_is_written",
    "tests/lab/profiling/test_recorder.py::test_stages_of_an_exchange",
    "tests/lab/cli/test_study.py::test_a_s",
    "tests/lab/cli/test_study.py::test_what_nothing_came_of",
    "tests/lab/recipes/test_cache.py::test_of_many_processes",
    "tests/lab/reports/test_page_in_browser.py",
    "tests/lab/study/test_carrying_out.py",
    "tests/lab/testbed/",
    "tests/members/test_sampler.py::test_with_workers",
    "tests/planning/test_cluster_prediction.py::test_thousands_of_ranks",
    "tests/members/test_members.py",
    "tests/members/test_members_by_hub.py",
    "tests/members/test_elastic_page.py",
    "tests/members/test_sharded_members.py",
    "tests/release/",
    "tests/replicas/test_replicas_on_gloo.py",
    "tests/reporting/test_trackers.py",
    "tests/session/test_journey.py",
    "tests/stores/pairs/test_pairs_on_gloo.py",
    "tests/stores/server/test_imported_codecs.py",
    "tests/stores/test_failing_workers.py",
    "tests/stores/test_training_with_servers.py",
    "tests/test_public_api.py",
    "tests/trainings/test_as_on_a_gpu.py",
    "tests/trainings/test_auto_on_gloo.py",
    "tests/trainings/test_compiled_models.py",
    "tests/trainings/test_daso.py",
    "tests/trainings/test_gloo.py",
    "tests/trainings/test_localsgd.py",
    "tests/trainings/test_lowbit.py",
    "tests/trainings/test_model_features.py",
    "tests/trainings/test_mp2.py",
    "tests/trainings/test_session_diagnose.py",
    "tests/trainings/test_three_ranks.py",
    "tests/trainings/test_training_loops.py",
    "tests/transports/test_thread_shutdown.py",
    "tests/user_scripts/test_user_scripts.py::test_it_is",
)
TWO_BYTES = (
    "tests/compressors/test_error_feedback.py::test_in_two_bytes_nothing_small_is_lost_round_after_round"
)
CHUNKS = "tests/kernels/test_select.py::test_the_largest_of_each_chunk"
RESUMED = "tests/algorithms/test_trajectories.py::test_a_run_that_is_saved_and_resumed_is_the_run_that_never"
LONG = (
    "tests/replicas/test_anchor_comparison.py::test_a_bit_that_differs_is_an_error_on_every_rank",
    "tests/replicas/test_anchor_comparison.py::test_ranks_that_agree_are_never_told_to_differ",
    "tests/replicas/test_buffers.py::test_a_run_that_is_resumed_is_the_run_that_never_stopped",
    "tests/replicas/test_buffers.py::test_a_variance_is_never_below_zero",
    "tests/merges/test_common_point.py::test_it_is_so_in_every_other_combination",
    "tests/merges/test_common_point.py::test_every_other_run_that_is_resumed",
    "tests/merges/test_common_point.py::test_nothing_is_lost_where_answers_come_late",
    "tests/rounds/test_observed_losses.py::test_a_loss_that_every_rank_has_told",
    "tests/merges/test_missed_rounds.py::test_all_go_on_together_from_checkpoints_of_one_moment",
    "tests/lab/study/test_replicas.py::test_replicas_end_equal",
    "tests/benchmarks/test_gpu_choices.py",
    "tests/benchmarks/test_peers.py::test_a_rank_trains_and_evaluates",
    "tests/replicas/test_served_replicas.py::test_in_other_types_too",
    "tests/replicas/test_two_byte_parameters.py::test_a_checkpoint_holds_what_rounding_took_away",
    "tests/replicas/test_two_byte_parameters.py::test_what_one_rank_in_eight_does_arrives",
    *(f"{RESUMED}_stopped[{stop}-" for stop in (5, 8)),
    "tests/lab/cli/test_gpu_plans.py",
    "tests/lab/cli/test_odd_input.py",
    "tests/lab/cli/test_parse_once.py::test_predictor",
    "tests/lab/cli/test_parse_once.py::test_worker",
    "tests/lab/cli/test_predictor.py",
    "tests/laws/test_allocation.py",
    "tests/laws/test_any_input.py::test_ranks_agree_and_finite_entries_stay_finite",
    "tests/laws/test_any_input.py::test_the_mean_is_of_what_was_sent_and_the_rest_is_owed",
    *(
        f"{TWO_BYTES}[{name}"
        for name in ("gtopk", "int8", "onebit", "powersgd", "select", "sign", "topk in int8")
    ),
    "tests/compressors/test_error_feedback.py::test_of_a_parameter_that_is_used_now_and_then",
    "tests/compressors/test_lag.py::test_rounds_are_skipped_and_it_converges",
    "tests/prediction/test_sent_subsets.py::test_what_is_sent_stands_for",
    "tests/prediction/test_sent_subsets.py::test_many_ranks_that_agree_are_never_told_to_differ",
    "tests/prediction/test_partly_sent.py::test_motion_that_shrinks_is_predicted_in_every_round",
    "tests/prediction/test_partly_sent.py::test_steady_motion_is_predicted",
    "tests/prediction/test_partly_sent.py::test_wrong_predictions_cost_no_more_than_none",
    "tests/planning/simulation/test_rehearsal.py::test_so_it_is_with_all_others",
    "tests/replicas/test_moment_periods.py::test_the_trajectory_is_the_papers",
    "tests/checkpoint/test_resize.py",
    *(f"{CHUNKS}[{sizes}" for sizes in ("256-256", "4000-4096")),
    "tests/laws/test_on_device.py::test_by_nodes_all_others_too",
    "tests/laws/test_on_device.py::test_in_other_types_too",
    "tests/laws/test_on_device.py::test_in_two_phases_all_others_too",
    "tests/laws/test_laws_by_topology.py::test_in_other_types_too",
    "tests/lab/recipes/test_cifar10_files.py::test_the_real_images",
    "tests/lab/recipes/test_image_recipes.py::test_every_network_learns",
    "tests/lab/recipes/test_mnist_files.py::test_the_real_digits",
    "tests/lab/predictor_training/test_predictor_training.py",
    "tests/lab/recipes/test_recipes.py::test_bytes_learns",
    "tests/lab/recipes/test_recipes.py::test_digits_learns",
    "tests/lab/recipes/test_recipes.py::test_recommender_learns",
    "tests/stores/client/test_chunking.py::test_it_comes_back_as_if_it_were_whole",
    "tests/stores/test_encoding.py::test_whatever_is_sent_is_read_or_refused",
    "tests/stores/server/test_waiting_ends.py",
    "tests/stores/pairs/test_random_pairs.py",
    "tests/topologies/test_choco.py",
    "tests/topologies/test_variable_length.py::test_the_same_bits_arrive_in_fewer_bytes",
    "tests/topologies/test_push_sum.py::test_the_minimum_of_the_mean_is_found",
    "tests/topologies/test_tree.py::test_nothing_is_lost_in_many_rounds_and_all_of_it_comes",
    "tests/topologies/test_tree.py::test_positions_in_every_way_of_writing_them",
    "tests/transports/test_launch_order.py::test_a_rank_with_other_values_launches_the_same",
)
"""Those that start no process, and take a second of processor time and more over all their values, where
others hold the same of fewer of them, or of parts."""
CHEAP = {"git", "uname"}
"""Programs that end at once: they say which machine this is, and which commit."""

Curves: TypeAlias = dict[str, list[tuple[int, float]]]


@pytest.fixture
def read_curves() -> Callable[[Path], Curves]:
    """Reads a run's event files: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> Curves:
        events = EventAccumulator(str(folder)).Reload()
        return {
            tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
        }

    return read


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where the system does not permit namespaces, and only there."""
    try:
        with Testbed(Cluster(1, 1)):
            pass
    except TestbedError as error:
        if "does not permit" not in str(error):
            raise
        pytest.skip(str(error))


LONGEST = (
    "trainings/test_gloo",
    "stores/test_failing_workers",  # which waits more than it computes
    "examples/test_examples",
    "lab/cli/test_run",
    "trainings/test_model_features",
    "kernels/test_triton",
    "user_scripts/test_user_scripts",
    "lab/cli/test_full_disk",
    "checkpoint/test_resize",
    "lab/cli/test_main",
    "trainings/test_as_on_a_gpu",
    "lab/cli/test_servers_by_command",
    "trainings/test_daso",
    "trainings/test_training_loops",
    "lab/testbed/test_testbed_failures",
    "gradients/test_delayed",
    "integrations/test_frameworks",
    "stores/test_training_with_servers",
)
"""Files of tests, longest first: where they are run side by side, none of them is begun last."""
WAITING = (
    "stores/server/test_registration",
    "stores/server/test_attacks",
    "stores/server/test_server_process",
    "failure/test_detector_and_barrier",
    "failure/test_bounded_store",
)
"""Those that wait, and need no processor for it: `make quick` begins with them, while others compute."""
QUICK = "not processes and not long"


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "run tests in so many processes, forked from the one that has collected them"
    parser.addoption("--forks", type=int, default=0, help=words)


def pytest_configure(config: pytest.Config) -> None:
    # Here and in all that is started, what wakes waits for a core, and takes it from nobody. Else a thread
    # that holds a lock of Gloo's often loses its core, and Gloo's own thread asks for that lock again and
    # again: a fifth of the processor time of ranks. Whoever has chosen another policy keeps it.
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if config.option.forks:
        config.pluginmanager.register(Forks(config.option.forks), "forks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which `make quick` runs nothing are not imported for it: seconds, in each of its workers."""
    quick = config.option.markexpr == QUICK
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if quick and name.startswith((*PROCESSES, *LONG)) else None


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look at it again and again, nor so often."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, all others in their order; and the marks."""
    here = Path(__file__).parent
    first = WAITING if config.option.markexpr == QUICK else LONGEST
    places = {here / f"{name}.py": place for place, name in enumerate(first)}
    assert all(file.exists() for file in places), places
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if item.nodeid.startswith(PROCESSES):
            item.add_marker("processes")
        if item.nodeid.startswith(LONG):
            item.add_marker("long")


class Guard:
    """Refuses that a test starts a process, unless it is marked.

    Functions are replaced, as a hook for audits would be called for each attribute that is looked up by C.

    Attributes:
        watching: whether a test without the mark runs.
        started: what it has tried to start.
    """

    STARTING = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")
    REPLACING = ("execv", "execve")

    def __init__(self) -> None:
        self.watching, self.started = False, list[str]()
        # The end of subprocess, of multiprocessing, and of all others.
        places = [(_posixsubprocess, "fork_exec"), *[(os, name) for name in self.STARTING + self.REPLACING]]
        for module, name in places:
            setattr(module, name, self._guarded(module, name))
        subprocess._fork_exec = _posixsubprocess.fork_exec  # type: ignore[attr-defined]

    def _guarded(self, module: Any, name: str) -> Callable[..., Any]:
        inner = getattr(module, name)

        def start(*args: Any, **options: Any) -> Any:
            self.refuse(name, args)
            return inner(*args, **options)

        start.__module__, start.__qualname__ = module.__name__, name  # a test pickles it by these
        return start

    def refuse(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise, where a test without the mark runs."""
        if not self.watching or (name == "fork_exec" and os.fsdecode(args[0][0]) in CHEAP):
            return
        self.started.append(f"{name} {args[:1]}")
        raise AssertionError(f"{self.started[-1]}: a test that starts processes belongs into PROCESSES")


GUARD = Guard()
ON_GPU = torch.cuda.is_available()
"""There Triton starts a compiler when a test launches a kernel."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    GUARD.watching = item.get_closest_marker("processes") is None and not ON_GPU
    GUARD.started.clear()
    try:
        return (yield)
    finally:
        GUARD.watching = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    done = yield
    assert not GUARD.started, "it has started a process, and went on without: mark it"
    return done


@pytest.fixture
def guard() -> Guard:
    """What the test itself has started, and may clear."""
    return GUARD
