"""What each paper claims, with which algorithms it was compared, and what is trained here to see.

Claims are those that have been read in the paper's abstract or its authors' code; what is only remembered of
a paper is not held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from runs import Run
from windows import Window, plan

Claimed: TypeAlias = Literal["time saved", "times fewer bytes", "accuracy"]
NODES, FLAT = "2x2", "4x1"
LINKS = "100mbit"
"""The links that times are measured on; accuracies come from links at full speed."""
LIMIT = 10_000
"""Training images."""
BIG_LIMIT = 5_120
"""For the large network that is only timed."""
PRECISIONS = ("bf16", "fp32")
"""What networks for images can compute in, the one first that is faster where a CPU knows it."""
DIGITS = 22
"""Steps of an epoch of `digits` on 4 ranks."""


@dataclass(frozen=True)
class Claim:
    """What a paper says of itself.

    Attributes:
        text: in our words; `read`: where.
        of: what of; `figure`: how much, None where it gives none: of time the share saved (0..1), of bytes
            how many times fewer, of accuracy the difference (0..1); `most`: where it gives a range, its end.
        algorithm: ours that is held to it; `against`: its rivals here.
    """

    text: str
    read: str
    of: Claimed
    figure: float | None
    algorithm: str
    against: tuple[str, ...] = ("ddp",)
    most: float | None = None


@dataclass(frozen=True)
class Network:
    """Something to train.

    Attributes:
        words: of its recipe, without data.
        steps: of an epoch, on 4 ranks.
        images: whether it needs CIFAR-10.
    """

    words: tuple[str, ...]
    epochs: int
    steps: int = LIMIT // 128
    images: bool = True

    def text(self, algorithm: str) -> str:
        """An algorithm as it is attached to train this."""
        return algorithm.replace("{epoch}", str(self.steps))


def _cifar(model: str, precision: str = PRECISIONS[0]) -> tuple[str, ...]:
    return ("cifar10", "--model", model, "--precision", precision, "--limit", str(LIMIT))


NETWORKS: Mapping[str, Network] = {
    "vgg11-narrow": Network(_cifar("vgg11-narrow"), 5),
    "resnet8": Network(_cifar("resnet8"), 3),
    "alexnet": Network(_cifar("alexnet"), 3),
    "vit": Network(_cifar("vit", "fp32"), 3),  # bf16 makes it slower
    "bytes": Network(("bytes",), 2, 120, images=False),
    "digits": Network(("digits",), 5, DIGITS, images=False),
    "gan": Network(("gan",), 20, DIGITS, images=False),
    **{
        f"optimizer:{name}": Network((f"optimizer:{name}",), 5, DIGITS, images=False)
        for name in ("sgd", "rmsprop", "adam", "adamw")
    },
}
RECIPES = [name for name in NETWORKS if name != "gan" and not name.startswith("optimizer:")]
"""What windows can train."""
SMALL = "vgg11-narrow"
"""Trained whole on the shaped links as well, to see whether windows foretell it; `digits` without images."""
BIG = Network(
    ("cifar10", "--model", "vgg11", "--precision", PRECISIONS[0], "--limit", str(BIG_LIMIT)),
    5,
    BIG_LIMIT // 128,
)
"""Timed in windows only."""


@dataclass(frozen=True)
class Experiment:
    """One paper.

    Attributes:
        algorithms: the baseline first; `{epoch}` in one stands for the steps of an epoch.
        trained: network -> the clusters it is trained on.
        cluster: the one that is tried with --quick, and where whole runs are made.
        lacks: of the paper's own comparison, what is not here, and other differences.
        elsewhere: which of the algorithms train what is not `SMALL`; none given: all.
    """

    paper: str
    algorithms: tuple[str, ...]
    claims: tuple[Claim, ...]
    trained: Mapping[str, tuple[str, ...]]
    cluster: str
    lacks: Sequence[str]
    elsewhere: tuple[str, ...] = ()


BOTH = (NODES, FLAT)
EDNNCOMM = "ednncomm"
DASO = "daso:warmup_epochs=1,cooldown_epochs=1"
DGC = "dgc:ratio=0.001,warmup_steps={epoch}"
POWERSGD = "powersgd:rank=2"
DILOCO = "diloco:sync_every=32"

EXPERIMENTS: Mapping[str, Experiment] = {
    "ednncomm": Experiment(
        "eDNNcomm (Moreno-Alvarez, Paoletti, Cavallaro & Haut, IEEE TNNLS 2023)",
        ("ddp", EDNNCOMM),
        (
            Claim("global training time is reduced", "abstract; no figure", "time saved", None, EDNNCOMM),
            Claim("accuracy slightly improves", "abstract; no figure", "accuracy", None, EDNNCOMM),
        ),
        {
            "vgg11-narrow": BOTH,
            "resnet8": (NODES,),
            "alexnet": (NODES,),
            "vit": (NODES,),
            "bytes": (NODES,),
            "gan": (NODES,),
            **{name: (NODES,) for name in NETWORKS if name.startswith("optimizer:")},
        },
        NODES,
        (
            "They train 400 epochs, of 98 steps on 4 processes.",
            "`gan` is an AC-GAN in small on 8x8 digits, and its accuracy the share of 1,000 digits made to "
            "order whose nearest real one is of the class asked for. `optimizer:NAME` is the recipe `digits` "
            "with it.",
        ),
    ),
    "daso": Experiment(
        "DASO (Coquelin, Debus, Goetz, von der Lehr, Kahn, Siggel & Streit, J. Big Data 2022)",
        ("ddp", "fp16", DASO),
        (
            Claim(
                "up to 34 % less training time than other data parallel methods",
                "abstract",
                "time saved",
                0.34,
                DASO,
                ("ddp", "fp16"),
            ),
        ),
        {"vgg11-narrow": BOTH, "resnet8": (NODES,)},
        NODES,
        (
            "The rival in the paper is Horovod; here it is DDP, with gradients in fp32 (`ddp`) and in half "
            "precision (`fp16`).",
            "One epoch each for warm-up and cool-down, which block, where the authors' example has 4 of 90.",
        ),
    ),
    "dgc": Experiment(
        "Deep gradient compression (Lin, Han, Mao, Wang & Dally, ICLR 2018)",
        ("ddp", "topk:ratio=0.001", "terngrad", DGC),
        (
            Claim("270 to 600 times less to send", "abstract", "times fewer bytes", 270.0, DGC, most=600.0),
            Claim("without loss of accuracy", "abstract", "accuracy", 0.0, DGC),
        ),
        {"vgg11-narrow": BOTH, "resnet8": (FLAT,), "alexnet": (FLAT,)},
        FLAT,
        (
            "The paper counts the gradients that a rank sends; here it is what a node's interface transmits, "
            "with positions, biases and headers, and what is passed on for others. Small networks have a "
            "larger share of biases, which are sent in full.",
            "The warm-up has one epoch.",
        ),
    ),
    "powersgd": Experiment(
        "PowerSGD (Vogels, Karimireddy & Jaggi, NeurIPS 2019)",
        (
            "ddp",
            "powersgd:rank=1",
            POWERSGD,
            "powersgd:rank=4",
            "topk:ratio=0.01",
            "randomk:ratio=0.01",
            "sign",
        ),
        (
            Claim(
                "the only method in its test that consistently gains time",
                "abstract; no figure",
                "time saved",
                None,
                POWERSGD,
            ),
        ),
        {"vgg11-narrow": (FLAT,), "resnet8": (FLAT,)},
        FLAT,
        (
            "Whether each gains time is held here, not that PowerSGD alone does: the others' rows tell.",
            "The paper's random blocks and Atomo are not part of tacit. Signum needs a learning rate of its "
            "own, and all train at one here: `sign` stands for signs, with what is left owed.",
        ),
        elsewhere=("ddp", POWERSGD, "topk:ratio=0.01"),
    ),
    "diloco": Experiment(
        "DiLoCo (Douillard et al. 2023)",
        ("ddp", "localsgd:sync_every=32", DILOCO),
        (),
        {"bytes": (FLAT,), "vgg11-narrow": BOTH},
        FLAT,
        (
            "None of the paper's figures has been read for this page, so none is held against it.",
            "Its rounds are 500 steps apart by default, here 32.",
        ),
    ),
}


@dataclass(frozen=True)
class Scale:
    """How much of an experiment is carried out.

    Attributes:
        seeds: how many, from 0 on; `blocks`: of each window.
        data: CIFAR-10; None for what needs none.
        quick: one cluster and one network.
        links: those that are shaped, as in a cluster's text.
        precision: of networks that are quick in either; see `fast_precision`.
    """

    seeds: int = 3
    blocks: int = 3
    data: str | None = None
    quick: bool = False
    links: str = LINKS
    precision: str = PRECISIONS[0]


QUICK = Network(("digits",), 4, DIGITS, images=False)


def fast_precision() -> str:
    """What networks for images compute fastest in on this CPU."""
    from tacit_lab.recipes.models.precision import is_native

    return PRECISIONS[0] if is_native() else PRECISIONS[1]


def settled(
    scale: Scale, wanted: Callable[[Scale], Collection[Run | Window]], held: Collection[Run | Window]
) -> Scale:
    """The scale in a precision of which all that is wanted is held, or else in the one that is fast here."""
    both = [replace(scale, precision=each) for each in PRECISIONS]
    there = (each for each in both if {one.key for one in wanted(each)} <= set(held))
    return next(there, replace(scale, precision=fast_precision()))


def networks(experiment: Experiment, scale: Scale) -> dict[str, tuple[Network, tuple[str, ...]]]:
    """What is trained, and on which clusters: `digits` takes the place of images that are not there."""
    if scale.quick:
        return {"digits": (QUICK, (experiment.cluster,))}
    found = {
        name: (NETWORKS[name], clusters)
        for name, clusters in experiment.trained.items()
        if scale.data or not NETWORKS[name].images
    }
    return (
        found if scale.data else {"digits": (Network(("digits",), 10, DIGITS, images=False), BOTH), **found}
    )


def words(network: Network, scale: Scale) -> tuple[str, ...]:
    """The recipe, with its data and in its precision."""
    told = [scale.precision if each == PRECISIONS[0] else each for each in network.words]
    return (*told, "--data", scale.data) if network.images and scale.data else (*told,)


def runs(experiment: Experiment, scale: Scale) -> list[Run]:
    """Training on links at full speed, for accuracies; a seed after the other."""
    return [
        Run(words(network, scale), network.text(algorithm), cluster, seed=seed, epochs=network.epochs)
        for seed in range(scale.seeds)
        for name, (network, clusters) in networks(experiment, scale).items()
        for cluster in clusters
        for algorithm in _trained(experiment, name)
    ]


def _trained(experiment: Experiment, name: str) -> tuple[str, ...]:
    main = name in (SMALL, "digits") or not experiment.elsewhere
    return experiment.algorithms if main else experiment.elsewhere


def checked(experiment: Experiment, scale: Scale) -> tuple[Network, str]:
    """What is trained whole on shaped links, and on which."""
    found = networks(experiment, scale)
    network, _ = found.get(SMALL) or found["digits"]
    return network, f"{experiment.cluster}@{scale.links}"


def whole_runs(experiment: Experiment, scale: Scale) -> list[Run]:
    """One run of each algorithm on shaped links, the same as the first on links at full speed.

    Of an algorithm with several settings it is that of the claims, or else the first.
    """
    network, cluster = checked(experiment, scale)
    claimed = [claim.algorithm for claim in experiment.claims]
    of_name: dict[str, str] = {}
    for algorithm in sorted(experiment.algorithms, key=lambda each: each not in claimed):
        of_name.setdefault(algorithm.partition(":")[0], algorithm)
    return [
        Run(words(network, scale), network.text(algorithm), cluster, seed=0, epochs=network.epochs)
        for algorithm in experiment.algorithms
        if algorithm in of_name.values()
    ]


def windows(experiment: Experiment, scale: Scale) -> list[Window]:
    """What is timed: what is trained whole, what else is a recipe, and the large network.

    That one is timed on both clusters where an algorithm goes by nodes.
    """
    network, cluster = checked(experiment, scale)
    settings = [(network, cluster, experiment.algorithms)]
    settings += [
        (each, f"{clusters[0]}@{scale.links}", _trained(experiment, name))
        for name, (each, clusters) in networks(experiment, scale).items()
        if each is not network and name in RECIPES
    ]
    if scale.data and not scale.quick:
        clusters = BOTH if experiment.cluster == NODES else (FLAT,)
        settings += [(BIG, f"{each}@{scale.links}", experiment.algorithms) for each in clusters]
    return [
        window
        for network, cluster, algorithms in settings
        for window in plan(
            Run(words(network, scale), "", cluster, epochs=network.epochs),
            [network.text(each) for each in algorithms],
            scale.blocks,
        )
    ]
