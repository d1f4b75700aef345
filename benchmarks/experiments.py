"""What each paper says of itself, what is held to it here, and the networks whose steps are timed.

Claims are those that have been read in the paper's abstract or its authors' code; what is only remembered of
a paper is not held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from runs import Run
from tacit_lab.study.jobs import written
from windows import Window, plan

LINKS = "100mbit"
"""The links that times are measured on."""
PRECISIONS = ("bf16", "fp32")
"""What networks for images can compute in, the one first that is faster where a CPU knows it."""
EPOCHS = 90
"""Of a training whose steps are timed: as many as DASO's authors train."""


@dataclass(frozen=True)
class Network:
    """Something whose steps are timed.

    Attributes:
        words: of its recipe, without data.
        steps: of an epoch, on 4 ranks.
        images: whether it needs CIFAR-10.
        label: what tables call it, and how many parameters it has.
    """

    words: tuple[str, ...]
    epochs: int
    steps: int
    images: bool = True
    label: str = ""


def _cifar(model: str, limit: int, epochs: int, label: str) -> Network:
    words = ("cifar10", "--model", model, "--precision", PRECISIONS[0], "--limit", str(limit))
    return Network(words, epochs, limit // 128, label=label)


BIG = _cifar("vgg11", 5_120, 5, "VGG-11, 9.2 million")
"""Timed only: nothing here trains it to an end."""
NETWORKS: Mapping[str, Network] = {
    "vgg11": BIG,
    "resnet8": _cifar("resnet8", 10_000, 3, "ResNet-8, 75 thousand"),
    "bytes": Network(("bytes",), 2, 120, images=False, label="GPT on bytes, 0.65 million"),
    "digits": Network(("digits",), 5, 22, images=False, label="`digits`, 1 million"),
}


@dataclass(frozen=True)
class Scale:
    """How much is measured, and of what.

    Attributes:
        blocks: of each window.
        data: CIFAR-10; None for what needs none.
        quick: little.
        links: those that are shaped, as in a cluster's text.
        precision: of networks that are quick in either; see `fast_precision`.
    """

    blocks: int = 3
    data: str | None = None
    quick: bool = False
    links: str = LINKS
    precision: str = PRECISIONS[0]


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


def words(network: Network, scale: Scale) -> tuple[str, ...]:
    """The recipe, with its data and in its precision."""
    told = [scale.precision if each == PRECISIONS[0] else each for each in network.words]
    return (*told, "--data", scale.data) if network.images and scale.data else (*told,)


# ---- the papers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paper:
    """One paper.

    Attributes:
        title: as the table of all papers has it, with a link to its figures; `page`: where these are, in
            docs/papers.
        says: what it claims, in our words, and where that was read.
        held: what is held to the claims, as benchmarks/accuracy.py writes it; `beside`: others that are timed
            and trained with it; `trained`: others whose accuracies stand there.
        rivals: what times and bytes are compared with.
        timed: (network, nodes) of each window.
        differs: why what is found is not what the paper says.
    """

    title: str
    says: str
    held: tuple[str, ...]
    timed: tuple[tuple[str, str], ...]
    differs: str
    rivals: tuple[str, ...] = ("ddp",)
    beside: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    page: str = "index.md"

    @property
    def arms(self) -> tuple[str, ...]:
        """All whose accuracies stand on the page."""
        return (*self.held, *self.rivals, *self.beside, *self.trained)

    def windows(self, scale: Scale) -> list[Window]:
        """What is measured."""
        arms = (*self.rivals, *self.held, *self.beside)
        return [
            window
            for name, nodes in self.timed
            for window in plan(
                Run(words(NETWORKS[name], scale), f"{nodes}@{scale.links}", epochs=EPOCHS),
                [attached(each, name) for each in arms],
                scale.blocks,
            )
        ]

    def quick(self) -> Paper:
        """The same, of whom the steps of `digits` are timed alone."""
        return replace(self, timed=(("digits", self.timed[0][1]),))


def attached(arm: str, network: str) -> str:
    """An arm as it is attached where the steps of a network are timed."""
    return written(arm, EPOCHS * NETWORKS[network].steps)


BY_NODE = (("vgg11", "2x2"), ("resnet8", "2x2"))
FLAT = (("vgg11", "4x1"), ("resnet8", "4x1"))

PAPERS: Mapping[str, Paper] = {
    "ednncomm": Paper(
        "[eDNNcomm](ednncomm.md)",
        "less training time, slightly better accuracy (abstract; no figures)",
        ("ednncomm",),
        BY_NODE,
        "Its scripts train 400 epochs, in each of which nodes exchange once. An epoch of CIFAR-10 has 375 "
        "steps here: 600 steps hold one exchange, 9,600 hold 25, and nodes drift apart in between.",
        page="ednncomm.md",
    ),
    "daso": Paper(
        "[DASO](daso.md)",
        "up to 34 % less time than other data-parallel methods (abstract)",
        ("daso",),
        BY_NODE,
        "Its rival was Horovod; here it is DDP, with gradients in fp32 (`ddp`) and in 16 bits (`fp16`). The "
        "more of a step is communication, the more is saved: at 100 Mbit/s with a large network most of it "
        "is. Times are of 90 epochs, 4 of warm-up and 4 of cool-down among them, as in its authors' example.",
        rivals=("ddp", "fp16"),
        page="daso.md",
    ),
    "mp2": Paper(
        "[MP²](mp2.md)",
        "up to 88.98 % less traffic and 47.32 % less time than plain pushing, no accuracy lost (abstract)",
        ("mp2", "mp2:predictor=stale"),
        (("resnet8", "4x1+1"), ("digits", "4x1+1")),
        "Which part is pushed, and the network's inputs and shapes, are not published: ours are our own. "
        "With `predictor=stale` nothing is predicted. Times and bytes are against plain pushing (`ps`): of "
        "pushes, and pulls are as short.",
        rivals=("ps",),
        beside=("lowbit", "ps-topk"),
        trained=("mp2:predictor=exponential", "mp2:predictor=own", "topk:ratio=0.03"),
        page="mp2.md",
    ),
    "dgc": Paper(
        "[DGC](#dgc)",
        "270 to 600 times less to send, no accuracy lost (abstract)",
        ("dgc:warmup_steps={tenth}", "dgc:ratio=0.01,warmup_steps={tenth}"),
        FLAT,
        "The paper counts a worker's gradients, of networks of 97 MB and more. Here it is all that a node's "
        "interface sends: positions, headers, biases, of which a small network has a larger share and which "
        "travel whole, and a message for each of three others. A tenth of the steps are warm-up. What "
        "is lost falls with the length: by `dgc` 11 points in 600 steps.",
        beside=("topk:ratio=0.01", "terngrad"),
        trained=("dgc:ratio=0.01,warmup_steps={tenth},masking=false",),
    ),
    "powersgd": Paper(
        "[PowerSGD](#powersgd)",
        "alone in its test to gain time in every case (abstract; no figures)",
        ("powersgd:rank=2", "topk:ratio=0.01"),
        FLAT,
        "Held here is whether it gains time. Where links are as slow as here, others do too.",
        beside=("randomk", "sign"),
        trained=("powersgd:rank=1", "powersgd:rank=4"),
    ),
    "diloco": Paper(
        "[DiLoCo](#diloco)",
        "as good as synchronous training with 8 workers, for 500 times less to send (abstract)",
        ("diloco:sync_every=32",),
        (("vgg11", "4x1"), ("bytes", "4x1")),
        "It trains language models with AdamW inside. Here replicas meet every 32 steps, as trainings are "
        "short, and on CIFAR-10 and MNIST SGD is inside.",
        trained=("localsgd:sync_every=32",),
    ),
}
