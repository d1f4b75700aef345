"""Who trains in the least time, by bandwidth and latency: the map and the rows of docs/how-to-choose.md.

`python benchmarks/choosing.py --map` asks the planner's clock for a step of each algorithm that cost at most
half a point of accuracy in the trainings of accuracy.py. A map is of one network and one length of training.
All take as many steps as plain training, so the shortest step is the shortest training.

The clock needs each network's profile, benchmarks/results/choosing-map-NETWORK.json. One that is not there is
taken, in some minutes; that of VGG-11 needs the images of CIFAR-10. What the clock says is kept in
choosing-map.json, so that a test draws the figure again without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import accuracy
from accuracy_page import COLOURS, enough, points
from markdown_tables import fill, markdown
from paired import RESULTS, ROOT, hardware
from tacit.algorithms import parse
from tacit.algorithms.registry import ENTRIES
from tacit.errors import TacitError
from tacit.files import put
from tacit.planning.cluster_prediction import predict
from tacit.planning.profile import Profile
from tacit_lab import measured_costs, step_profiles
from tacit_lab.cluster import Cluster
from tacit_lab.cluster_plans import of_cluster, told_apart
from tacit_lab.records import CHOOSING
from tacit_lab.study.jobs import read, uncoded
from tacit_lab.testbed import Testbed

Row: TypeAlias = Mapping[str, Any]
FILE = RESULTS / "choosing-map.json"
FIGURE = ROOT / "docs" / "images" / "choosing.svg"
PAGE = ROOT / "docs" / "how-to-choose.md"
NETWORKS = {
    "digits": "1 million parameters (digits), SGD",
    "vgg11": "9 million parameters (VGG-11), SGD",
    "bytes": "0.6 million (byte-level GPT), AdamW",
}
TASKS = {"cifar10": "CIFAR-10", "mnist": "MNIST", "text": "Python's library"}
SGD = (("cifar10", 600), ("cifar10", 2400), ("mnist", 2400))
MAPS = {"digits": SGD, "vgg11": SGD, "bytes": (("text", 600), ("text", 2400))}
"""Whose seconds -> whose accuracies, after how many steps: a map each."""
RATES = ("10mbit", "30mbit", "100mbit", "300mbit", "1gbit", "3gbit", "10gbit")
LATENCIES = ("0.1ms", "1ms", "10ms", "30ms", "100ms")
NODES = "4x1"
MOST = 0.005
"""What an algorithm may lose in the mean over seeds, and be on a map: half a point."""
PLAIN = "ddp"


@dataclass(frozen=True)
class Situation:
    """A row of the table: what somebody has, and what to write there.

    Attributes:
        network: whose seconds and bytes are told; `task`, `steps`: whose accuracy.
    """

    has: str
    cluster: str
    write: str
    network: str
    task: str
    steps: int


SITUATIONS = (
    Situation("links of 10 Gbit/s", "4x1@10gbit,0.1ms", "bf16", "vgg11", "cifar10", 600),
    Situation("1 Gbit/s, some hundred steps to train", "4x1@1gbit,0.1ms", "qsgd", "vgg11", "cifar10", 600),
    Situation(
        "100 Mbit/s, some thousand steps", "4x1@100mbit,1ms", "lowbit:bits=2", "vgg11", "cifar10", 2400
    ),
    Situation(
        "the same, and 30 ms", "4x1@100mbit,30ms", "lowbit:bits=2,sync_every=3", "vgg11", "cifar10", 9600
    ),
    Situation(
        "100 Mbit/s, AdamW on DDP",
        "4x1@100mbit,1ms",
        "zeroone-adam:freeze_step=60,refresh=10,sync_every=2",
        "bytes",
        "text",
        2400,
    ),
    Situation(
        "two places, 30 ms apart, a long training",
        "4x1@100mbit,1ms,2places=30ms",
        "streaming-diloco",
        "vgg11",
        "mnist",
        9600,
    ),
)


# ---- what may be on a map -----------------------------------------------------------------------------


def trainings() -> list[Row]:
    """What the recorded trainings come to."""
    done = read(RESULTS / accuracy.FILE)
    return enough(accuracy.STUDY.rows(done, accuracy.STUDY.there(done), range(CHOOSING)))


def longest(rows: Sequence[Row], task: str, steps: int) -> dict[str, Row]:
    """Of each algorithm, without its entropy coder, the longest training of a task of up to so many steps."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["task"] == task and row["steps"] <= steps:
            arm = uncoded(row["arm"])
            found[arm] = max(row, found.get(arm, row), key=lambda each: int(each["steps"]))
    return found


def allowed(rows: Sequence[Row], task: str, steps: int) -> list[str]:
    """What lost at most half a point there.

    An entropy coder changes no number, and what it saves is not known before: it is left out. So is what
    sends other messages in the course of a training, what is for nodes of several ranks, and what is here
    only to be compared with.
    """
    good = [
        arm
        for arm, row in longest(rows, task, steps).items()
        if row["gap"]["mean"] >= -MOST
        and "{" not in arm
        and not (entry := ENTRIES[arm.partition(":")[0]]).instead
        and entry.family != "hierarchical"
    ]
    return told_apart([PLAIN, *(arm for arm in good if arm != accuracy.PLAIN)])


# ---- by the planner's clock ---------------------------------------------------------------------------


def profile_of(network: str, texts: Sequence[str], data: str | None) -> Profile:
    """The network's profile with what these algorithms cost: that which is kept, or one that is taken now.

    A kept one is given the costs that it lacks, if it is of this machine's processor.

    Raises:
        SystemExit: it must be taken, and there are no images.
    """
    path, layouts = RESULTS / f"choosing-map-{network}.json", [(4, 1)]
    if path.exists():
        kept = Profile.load(path)
        profile = measured_costs.with_costs(kept, texts, layouts)
        if profile.costs != kept.costs:
            profile.save(path)
        return profile
    words = ["--recipe", network]
    if network == "vgg11":
        if data is None:
            raise SystemExit(f"{path.name} is not there, and takes the images of CIFAR-10: write --data PATH")
        words = ["--recipe", "cifar10", "--model", network, "--data", data]
    with Testbed(Cluster(1, 2, namespaces=False)) as bed:
        planned = measured_costs.predictable(texts)
        profile = step_profiles.of_recipe(bed, words, planned, layouts, asked=False)
    profile.save(path)
    return profile


def steps_on(profile: Profile, cluster: str, texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Of each algorithm that can be foretold there: ms of a step, and MB that leave a node in it."""
    network, found = of_cluster(Cluster.parse(cluster), profile), {}
    for text in texts:
        try:
            step = predict(parse(text), profile, network)
        except TacitError:
            continue
        found[text] = (round(1e3 * step.seconds, 3), round(step.bytes_out / 1e6, 4))
    return found


def foretold(rows: Sequence[Row], data: str | None) -> dict[str, Any]:
    """The steps of all that is on a map or in the table, by network and cluster, as the file keeps them."""
    steps: dict[str, dict[str, Any]] = {}
    for network, maps in MAPS.items():
        wanted = told_apart(text for of in maps for text in allowed(rows, *of))
        here = [each for each in SITUATIONS if each.network == network]
        profile = profile_of(network, told_apart([*wanted, *(each.write for each in here)]), data)
        steps[network] = {each: steps_on(profile, each, wanted) for each in clusters()}
        for each in here:
            more = steps_on(profile, each.cluster, [PLAIN, each.write])
            steps[network][each.cluster] = {**steps[network].get(each.cluster, {}), **more}
    return {"hardware": hardware(), "steps": steps}


def clusters() -> Iterator[str]:
    """Those of a map, row by row."""
    return (f"{NODES}@{rate},{latency}" for latency in LATENCIES for rate in RATES)


# ---- the figure ---------------------------------------------------------------------------------------

CELL, HIGH, LEFT, TOP, GAP = 40, 24, 60, 44, 26
SPACE = TOP + len(LATENCIES) * HIGH + 34
"""A cell's width and height; what is left of a row of maps, above and between them; and a row's height."""
Won: TypeAlias = dict[str, tuple[str, float]]


def winners(steps: Row, rows: Sequence[Row], network: str, task: str, training: int) -> Won:
    """On each cluster the fastest of what a map may have, and how many times as fast as plain DDP it is."""
    among, found = allowed(rows, task, training), Won()
    for cluster in clusters():
        here: dict[str, list[float]] = steps[network][cluster]
        best = min((text for text in among if text in here), key=lambda text: here[text][0])
        found[cluster] = best, here[PLAIN][0] / here[best][0]
    return found


def figure(steps: Row, rows: Sequence[Row]) -> str:
    """The maps as SVG: a row a network, a column a length of training; the legend below."""
    won = {network: [winners(steps, rows, network, *of) for of in maps] for network, maps in MAPS.items()}
    names = list(dict.fromkeys(name for maps in won.values() for each in maps for name, _ in each.values()))
    parts = []
    for i, (network, maps) in enumerate(won.items()):
        for j, (each, (task, training)) in enumerate(zip(maps, MAPS[network], strict=True)):
            titles = NETWORKS[network], f"accuracies of {training:,} steps of {TASKS[task]}"
            at = f"translate({LEFT + j * (len(RATES) * CELL + GAP)} {i * SPACE + TOP})"
            parts.append(f'<g transform="{at}">{_map(each, names, titles, named=not j)}</g>')
    top = len(won) * SPACE + 20
    parts += [
        f'<rect x="{LEFT}" y="{top + 20 * i - 13}" width="26" height="17" {_fill(i)}/>'
        f'<text x="{LEFT + 9}" y="{top + 20 * i}">{_letter(i)}</text>'
        f'<text x="{LEFT + 36}" y="{top + 20 * i}">{name}</text>'
        for i, name in enumerate(names)
    ]
    width, height = LEFT + 3 * (len(RATES) * CELL + GAP), top + 20 * len(names)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="font: 11px sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _map(won: Won, names: Sequence[str], titles: tuple[str, str], named: bool) -> str:
    """A map; `named`: whether the latencies stand beside it."""
    parts = [
        f'<text y="-22" font-weight="bold">{titles[0]}</text><text y="-7">{titles[1]}</text>',
    ]
    for i, (name, times) in enumerate(won.values()):
        x, y, which = i % len(RATES) * CELL, i // len(RATES) * HIGH, names.index(name)
        said = f"{times:.0f}" if times >= 9.95 else f"{times:.1f}"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{HIGH}" stroke="white" {_fill(which)}/>'
            f'<text x="{x + CELL / 2:g}" y="{y + 16}" text-anchor="middle">{_letter(which)} {said}</text>'
        )
    low = len(LATENCIES) * HIGH + 14
    for i, rate in enumerate(RATES):
        said = rate.replace("bit", "").replace("m", " M").replace("g", " G")
        parts.append(f'<text x="{i * CELL + CELL / 2:g}" y="{low}" text-anchor="middle">{said}</text>')
    for i, latency in enumerate(LATENCIES if named else ()):
        said = latency.replace("ms", " ms")
        parts.append(f'<text x="-6" y="{i * HIGH + 16}" text-anchor="end">{said}</text>')
    return "".join(parts)


def _fill(which: int) -> str:
    return f'fill="{COLOURS[which % len(COLOURS)]}" fill-opacity="0.3"'


def _letter(which: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[which]


# ---- the table ----------------------------------------------------------------------------------------


def table(found: Row, rows: Sequence[Row]) -> str:
    """What to write in six situations, and what it costs, as Markdown; `found`: what the file keeps."""
    steps, about, lines = found["steps"], found["hardware"], []
    for each in SITUATIONS:
        here = steps[each.network][each.cluster]
        (ms, sent), (plain, all_) = here[each.write], here[PLAIN]
        row = longest(rows, each.task, each.steps)[uncoded(each.write)]
        lines.append(
            [
                each.has,
                f"`{each.write}`",
                f"{_short(sent)} of {_short(all_)}",
                f"{_short(ms)} for {_short(plain)}",
                f"{points(row['gap'])} after {row['steps']:,} steps of {TASKS[each.task]}",
            ]
        )
    head = ("you have", "write", "MB a step and machine, of DDP's", "ms a step, for DDP's", "points")
    made = f"{about['date']}, {about['cpu']}, tacit at {about['commit']}."
    return f"{markdown(head, lines)}\n\n{made}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def write(data: str | None) -> list[Path]:
    """Ask the clock, and write the file, the figure and the table: which files these are."""
    rows = trainings()
    found = foretold(rows, data)
    put(FILE, json.dumps(found, indent=None, separators=(",", ":")).replace('"4x1@', '\n"4x1@') + "\n")
    put(FIGURE, figure(found["steps"], rows))
    fill(PAGE, "choosing.py --map", table(found, rows))
    return [FILE, FIGURE, PAGE]
