"""`tacit plan`: how fast each strategy would be on a cluster that one may not have."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tacit.errors import ConfigError
from tacit.files import output, put
from tacit_lab import recipes
from tacit_lab.cli import parsing
from tacit_lab.cli.importing import Modules, import_own
from tacit_lab.cli.interrupts import interruptible
from tacit_lab.cluster import Cluster
from tacit_lab.impairment import Impairment
from tacit_lab.testbed import Testbed

if TYPE_CHECKING:
    from tacit.planning.profile import Profile
    from tacit.planning.simulation.clock import Network
    from tacit_lab.cluster_plans import ClusterPlan

EPILOG = (
    "Nothing is measured on that cluster: a few steps of the training are profiled here, and a clock runs "
    "each strategy's messages over links of these rates, by the collectives of Gloo, which are rings, or on "
    "a GPU by NCCL's. What the columns are stands below the table. Parameter servers cannot be planned. "
    "With --churn: a member is given up after 5 s; the steps are those without any communication."
)
_RANKS = 2


def command(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]", help="What is trained, a recipe or none with --profile, e.g. digits"
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(help="The cluster, NODESxRANKS@RATE,LATENCY, e.g. 64x8@10gbit,0.1ms"),
    ] = "4x1@1gbit",
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="The algorithms, with commas; all: those that need no server; by default one of each kind, "
            "e.g. ddp,topk",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A profile of your training that tacit profile has saved, e.g. profile.json",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="Links of this cluster that tacit probe has measured, in place of rates, e.g. links.json",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The recipe's model, e.g. resnet8", show_default=False)
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="The recipe's data, e.g. cifar10.tar.gz", metavar="PATH", show_default=False),
    ] = None,
    cores: Annotated[
        float | None,
        typer.Option(
            help="Cores of each node; by default as many as its ranks can use, e.g. 16", show_default=False
        ),
    ] = None,
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated",
            help="Plan for the emulated cluster: all nodes share this machine's cores, e.g. --emulated",
        ),
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(help="GB that a rank may use; what needs more is left out, e.g. 16", show_default=False),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Which algorithm wins at which rate and number of nodes, e.g. bandwidth=10mbit,1gbit",
            show_default=False,
        ),
    ] = None,
    churn: Annotated[
        str | None,
        typer.Option(
            help="How long a replica lives in the mean: goodput and staleness of members that fail at "
            "random, by the steps between two rounds, e.g. 1h",
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            help="How many members, for --churn; by default the nodes of the cluster, e.g. 1000",
            show_default=False,
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            help="Where to draw it, with the timeline of a step, e.g. plan.html",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, e.g. tacit plan digits --json | jq")
    ] = False,
    modules: Modules = None,
) -> None:
    """Predict how fast strategies would be on a cluster that you may not have.

    E.g. tacit plan digits --cluster 64x8@10gbit,0.1ms, or tacit plan --profile profile.json
    """
    import_own(modules)
    shape = parsing.cluster(cluster, 0, planned=True)
    saved = parsing.path("--profile", profile)
    if recipe is not None and saved is not None:
        raise ConfigError(
            f"both a recipe, {recipe!r}, and --profile {profile} were given: leave one out, as a plan is of "
            "one training"
        )
    if recipe is None and saved is None:
        raise ConfigError(
            "say what is trained: a recipe, such as tacit plan digits, or a profile of "
            "your own training, such as tacit plan --profile profile.json (tacit profile makes one)"
        )
    drawn = parsing.path("--page", page)
    if drawn is not None:
        output(drawn, "--page")
    rates = None if sweep is None else _rates(sweep)
    lives, members = _churn(churn, replicas, shape.nodes)
    with interruptible(), nullcontext() if recipe is None else _ranks(recipe) as bed:
        from tacit.algorithms import parse
        from tacit.planning.simulation.costs import LARGEST
        from tacit.planning.step_profiler import measurable
        from tacit_lab import cluster_plans, measured_costs
        from tacit_lab.churn_plan import ChurnPlan
        from tacit_lab.reports import plan as drawing

        texts = [*cluster_plans.CANDIDATES] if algorithms is None else parsing.split_algorithms(algorithms)
        if texts == ["all"]:
            texts = cluster_plans.every_algorithm()
        wanted = cluster_plans.layouts(shape.nodes, shape.ranks_per_node)
        if rates is not None:
            swept = [(nodes, shape.ranks_per_node) for nodes in (2, LARGEST)]
            wanted = [*dict.fromkeys([*wanted, *swept])]
        if saved is not None:
            found, texts, unfit = _completed(saved, texts, wanted, algorithms is not None)
        else:
            assert recipe is not None
            assert bed is not None
            choices = recipes.Choices(model=model, data=parsing.path("--data", data))
            found, texts, unfit = _profiled(bed, recipe, choices, texts, wanted, algorithms is not None)
    _say(f"Predicting {len(texts)} algorithms on {shape}")
    network = _network(shape, found, links, cores, emulated)
    if algorithms is None:
        shapes = cluster_plans.shapes_worth_a_look(found, network)
        texts = [*texts, *shapes]
        if measurable(found):  # else they are listed with the command that measures them
            found = measured_costs.with_costs(found, shapes, wanted)
    made = cluster_plans.plan(found, network, texts, None if memory is None else memory * 1e9, unfit)
    grid = [] if rates is None else _sweep(shape, found, network, texts, rates)
    if saved is not None and algorithms is None and found.gpu is not None:
        there = {parse(each.algorithm).name.partition(":")[0] for each in found.costs}
        default = [*cluster_plans.CANDIDATES, *(cluster_plans.FOR_ADAM if "Adam" in found.stepped_by else ())]
        lacking = tuple(text for text in default if text.partition(":")[0] not in there)
        made = replace(made, unweighed=lacking)
    title = f"{recipe or profile} on {shape}"
    if algorithms is None and not found.optimizers:
        typer.echo(
            "Not filtered by the optimizer, which this profile does not know: 'dgc' is for SGD alone, and "
            "'topk', 'efsign' and 'powersgd' cost accuracy with Adam.",
            err=True,
        )
    if shape.sites > 1:
        typer.echo("The plan knows no places: all nodes are as far apart as two places.", err=True)
    if any(shape.impairment_of(node).loss for node in range(shape.nodes)):
        typer.echo("Where packets are lost, links carry what one connection of TCP Reno does.", err=True)
    if any(replace(shape.impairment_of(node), loss=0.0) != Impairment() for node in range(shape.nodes)):
        typer.echo("The plan is made without the links' jitter, MTU and NAT.", err=True)
    coming = None if lives is None else ChurnPlan(members, lives, made.compute)
    if as_json:
        going = {} if coming is None else {"churn": coming.to_json()}
        typer.echo(json.dumps({**drawing.to_json(made, title, grid), **going}))
    else:
        lines = [] if coming is None else ["", *coming.lines()]
        typer.echo("\n".join([drawing.to_text(made, title, grid), *lines]))
    if drawn is not None:
        of = recipe or f"--profile {profile}"
        put(drawn, drawing.page(made, title, grid, f"tacit plan {of} --cluster {shape}"))
        typer.echo(f"Page: {drawn}", err=as_json)


def _churn(churn: str | None, replicas: int | None, nodes: int) -> tuple[float | None, int]:
    """Seconds that a replica lives, and how many there are."""
    if churn is None and replicas is not None:
        raise ConfigError(f"--replicas {replicas} is for --churn: write --churn 1h, say, or leave it out")
    members = nodes if replicas is None else parsing.whole("--replicas", replicas)
    return None if churn is None else parsing.duration("--churn", churn, "1h"), members


@contextmanager
def _ranks(recipe: str) -> Iterator[Testbed]:
    """Where a recipe is profiled; its ranks' imports begin, as those of this process take as long."""
    recipes.check(recipe)
    _say(f"Profiling {recipe} on {_RANKS} ranks of this machine")
    with Testbed(Cluster(1, _RANKS, namespaces=False)) as bed:
        bed.import_ahead()
        yield bed


def _say(text: str) -> None:
    """Say what takes a while, to whoever waits for it at a terminal."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _completed(
    saved: Path, texts: Sequence[str], layouts: Sequence[tuple[int, int]], asked: bool
) -> tuple[Profile, list[str], dict[str, str]]:
    """A profile that was saved, with the costs that it lacks; see `_profiled`."""
    from tacit.planning.candidates import fitting_texts
    from tacit.planning.profile import Profile
    from tacit_lab import cluster_plans, measured_costs

    profile = Profile.load(saved)
    profile.check_whole()
    wanted = [*texts, *cluster_plans.FOR_ADAM] if profile.optimizers and not asked else texts
    if profile.gpu is not None and not asked:  # others could not be measured here
        wanted = cluster_plans.told_apart(each.algorithm for each in profile.costs)
    fitting, unfit = fitting_texts(wanted, profile, asked)
    return measured_costs.with_costs(profile, fitting, layouts), fitting, unfit


def _profiled(
    bed: Testbed,
    recipe: str,
    choices: recipes.Choices,
    texts: Sequence[str],
    layouts: Sequence[tuple[int, int]],
    asked: bool,
) -> tuple[Profile, list[str], dict[str, str]]:
    """The profile of a recipe, taken now. `asked`: whether the user has named the texts.

    Returns:
        The profile, the texts that fit its optimizers, and the reasons against the others.
    """
    from tacit.planning.candidates import fitting_texts
    from tacit_lab import cluster_plans, measured_costs, step_profiles

    recipes.get(recipe, choices)
    wanted = texts if asked else [*texts, *cluster_plans.FOR_ADAM]
    words = ["--recipe", recipe, *choices.words()]
    profile = step_profiles.of_recipe(bed, words, measured_costs.predictable(wanted), layouts, asked)
    return profile, *fitting_texts(wanted, profile, asked)


def _network(
    shape: Cluster, profile: Profile, links: str | None, cores: float | None, emulated: bool
) -> Network:
    from tacit.links import Links
    from tacit.planning.simulation import networks
    from tacit_lab import cluster_plans

    if emulated and profile.gpu is not None:
        raise ConfigError(
            "--emulated is for processors, whose cores the emulated nodes share, and the profile is of a "
            "GPU: leave it out"
        )
    if cores is not None and not cores > 0:
        raise ConfigError(f"--cores {cores} must be more than 0, e.g. --cores 16")
    network = cluster_plans.of_cluster(shape, profile, cores=cores, emulated=emulated)
    saved = parsing.path("--links", links)
    if saved is None:
        return network
    told = Links.load(saved)
    nodes = [
        range(node * shape.ranks_per_node, (node + 1) * shape.ranks_per_node) for node in range(shape.nodes)
    ]
    told.check_layout(nodes)
    real = networks.measured(told, profile)
    return replace(real, cores=network.cores, sharing=network.sharing)


def _rates(text: str) -> list[float]:
    name, _, values = text.partition("=")
    words = parsing.split(values)
    if name != "bandwidth" or not words:
        raise ConfigError(f"--sweep {text} is not possible: write for example --sweep bandwidth=10mbit,1gbit")
    found = [Cluster.parse(f"2x1@{word}").rate for word in words]
    if any(rate is None for rate in found):
        raise ConfigError(f"--sweep {text} has something else than rates: write bandwidth=10mbit,1gbit")
    return [rate for rate in found if rate is not None]


def _sweep(
    shape: Cluster, profile: Profile, network: Network, texts: Sequence[str], rates: Sequence[float]
) -> list[ClusterPlan]:
    """Plans for all these rates, and for 2, 4, 8 and so on of the nodes."""
    from tacit.planning.simulation.networks import between_gpus
    from tacit_lab import cluster_plans

    counts = [count for count in (2**i for i in range(1, 11)) if count < shape.nodes] + [shape.nodes]
    found = []
    for nodes in counts:
        for rate in rates:
            scaled = replace(network, nodes=nodes, rate=rate * cluster_plans.FRAMES / 8, rates=())
            scaled = between_gpus(scaled, profile)
            found.append(cluster_plans.plan(profile, scaled, texts))
    return found
