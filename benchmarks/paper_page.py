"""The page of an experiment: a paper's claims, and what was measured, next to one another."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from experiments import PRECISIONS, Claim, Experiment
from grid import COMPUTE_ONLY, Done, Run, paired
from markdown_tables import markdown
from tacit_lab.intervals import Mean
from windows import FIRST, Found

CLOSE = 0.05
"""How near a whole run must come to what windows foretell."""
MACHINE = ("cpu", "kernel")
"""What tells machines apart: a run of one and a window of another are not held against each other."""
STEADY = "without warm-up"
"""How the part is called that a long run has most of; DASO's cool-down is not in it either."""
DISTURBED = 0.02
"""The share of the processors' time, withheld by the hypervisor, from which on a page says so."""
ENOUGH = 200
"""Steps that such a run must have."""


@dataclass(frozen=True)
class Evidence:
    """What was measured for an experiment.

    Attributes:
        done: training on links at full speed; `wanted`: how many runs were asked for.
        whole: runs on shaped links.
        found: windows.
        command: how to make all this.
    """

    done: Sequence[Done]
    wanted: int
    whole: Sequence[Done]
    found: Sequence[Found]
    command: str
    quick: bool


Part: TypeAlias = tuple[str, Sequence[Done] | Sequence[Found]]
"""A part of what was made: how it is called, and what it is."""


def page(experiment: Experiment, evidence: Evidence) -> str:
    """The page, in Markdown."""
    head = [f"# {experiment.paper}", "", _about(evidence)]
    if evidence.quick:
        head += ["", "**A quick run: few steps of a small network, few seeds. It judges nothing.**"]
    parts = [
        ("The claims", claims(experiment, evidence)),
        ("Accuracy", accuracies(experiment, evidence.done)),
        ("Time and bytes", times(experiment, evidence.found)),
        ("Whole runs against windows", checks(evidence)),
        ("What differs from the paper", _differences(experiment, evidence)),
        ("What failed", _failures(evidence)),
    ]
    body = [line for title, text in parts if text for line in ("", f"## {title}", "", text)]
    return "\n".join([*head, *body, ""])


DIFFERENCES = (
    "Small networks, few images and few epochs; four ranks on one machine. Absolute accuracies and times are "
    "not the paper's.",
    "Accuracies come from links at full speed, and times from windows on shaped ones: what these algorithms "
    "train does not depend on the network. The section on whole runs holds the times to the test.",
)


def _differences(experiment: Experiment, evidence: Evidence) -> str:
    timed = {_what(each.window.run) for each in evidence.found}
    only = dict.fromkeys(label_of(each.run) for each in evidence.done if _what(each.run) not in timed)
    told = [*DIFFERENCES, *experiment.lacks]
    if {each.run.recipe for each in evidence.whole} - {each.run.recipe for each in evidence.done}:
        told.append(
            "Accuracies and times are of different precisions: each was measured in the one that was faster "
            "on the CPU that was there. What an algorithm saves of the time does not hang on accuracies."
        )
    told += [f"Accuracy only, no times: {'; '.join(only)}."] if only else []
    if not any("--data" in each.run.recipe for each in evidence.done):
        told.append("CIFAR-10 was not there: `digits` takes the place of all images.")
    return "\n".join(f"* {each}" for each in told)


def _what(run: Run) -> tuple[str, ...]:
    """A recipe in whatever precision."""
    return tuple(each for each in run.recipe if each not in PRECISIONS)


def _about(evidence: Evidence) -> str:
    good = sum(each.status == "ok" and each.run.algorithm != COMPUTE_ONLY for each in evidence.done)
    parts: list[Part] = [
        (f"{good} of {evidence.wanted} training runs", evidence.done),
        (f"{len(evidence.found)} windows", evidence.found),
        ("whole runs on shaped links", evidence.whole),
    ]
    return about(evidence.command, parts)


def about(command: str, parts: Sequence[Part]) -> str:
    """What was made by a command, when, at which commits, and on what."""
    made = [
        f"{what}, of {every('date', which)}, at {every('commit', which)}" for what, which in parts if which
    ]
    whole = [each for _, which in parts for each in which]
    cpu, cores, kernel, python, torch = (
        every(fact, whole) for fact in ("cpu", "cores", "kernel", "python", "torch")
    )
    return (
        f"`{command}`: {'; '.join(made)}. {cpu}, {cores} cores, Linux {kernel}, Python {python}, torch "
        f"{torch}; one thread a rank, Gloo. A commit with a + had changes that it does not hold."
    )


def every(fact: str, made: Iterable[Done | Found]) -> str:
    """What the hardware's records say of a fact, each answer once."""
    return " and ".join(sorted({str(each.hardware.get(fact)) for each in made})) or "-"


# ---- claims -------------------------------------------------------------------------------------------


def claims(experiment: Experiment, evidence: Evidence) -> str:
    """A row for each claim, each rival and each setting that it was measured in."""
    if not experiment.claims:
        return "None of the paper's figures has been read, so that none is held against what was measured."
    rows = [
        [claim.text, claim.read, *held]
        for claim in experiment.claims
        for against in claim.against
        for held in _held(claim, against, evidence)
    ]
    head = ["the paper says", "read in its", "measured with", "against", "measured", "measured - claimed"]
    return markdown(head, rows)


def _held(claim: Claim, against: str, evidence: Evidence) -> list[tuple[str, str, str, str]]:
    """Of a claim: the setting, the rival, what was measured, and how far that is from what was claimed."""
    if claim.of == "accuracy":
        return [
            (
                f"{label(row)}, {row['cluster']}",
                f"`{against}`",
                f"{_points(row['difference'])} points",
                _apart(100 * row["difference"].mean, claim, 100, ".2f", " points"),
            )
            for row in paired(evidence.done, against)
            if _same(row["algorithm"], claim.algorithm) and row["difference"] is not None
        ]
    held = []
    for found in evidence.found:
        mine = next((each for each in found.parts if _same(each, claim.algorithm)), None)
        if mine is None or against not in found.parts:
            continue
        setting = f"{label_of(found.window.run)}, {found.window.run.cluster}"
        (fast, few), (slow, many) = found.steady(mine), found.steady(against)
        warms = len(found.parts[mine]) > 1
        if claim.of == "time saved":
            whole = 1 - found.seconds(mine) / found.seconds(against)
            steady = f"{STEADY} {_less(1 - fast / slow)}, " if warms else ""
            least, most = found.saved(mine, against)
            measured = f"{_less(whole)} time ({steady}by blocks {_between(least, most)})"
            apart = _apart(100 * whole, claim, 100, ".1f", " points")
        else:
            whole = found.megabytes(against) / found.megabytes(mine)
            measured = f"{many / few:.0f} times fewer" + (f" {STEADY}, {whole:.0f} with it" if warms else "")
            apart = _apart(many / few, claim, 1, ".0f", " times")
        held.append((setting, f"`{against}`", measured, apart))
    return held


def _apart(measured: float, claim: Claim, scale: float, form: str, unit: str) -> str:
    if claim.figure is None:
        return ""
    if claim.most is not None and scale * claim.figure <= measured <= scale * claim.most:
        return "within"
    nearest = min(
        (each for each in (claim.figure, claim.most) if each is not None),
        key=lambda each: abs(measured - scale * each),
    )
    return f"{measured - scale * nearest:+{form}}{unit}"


def _less(share: float) -> str:
    """A share of the time, as it is saved or lost."""
    return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}"


def _between(least: float, most: float) -> str:
    return f"{least:.1%} to {_less(most)}" if least >= 0 else f"{_less(least)} to {_less(most)}"


def _same(text: str, algorithm: str) -> bool:
    """Whether a text is the algorithm's, whatever stands for the steps of an epoch."""
    before, mark, after = algorithm.partition("{epoch}")
    return text.startswith(before) and text.endswith(after) if mark else text == algorithm


# ---- accuracy -----------------------------------------------------------------------------------------


def accuracies(experiment: Experiment, done: Sequence[Done]) -> str:
    """Each algorithm against the baseline, paired by seed."""
    base = experiment.algorithms[0]
    rows = [
        [
            label(row),
            row["cluster"],
            f"`{row['algorithm']}`",
            f"{row['baseline_accuracy'].mean:.4f}",
            f"{row['accuracy'].mean:.4f}",
            _points(row["difference"]),
            str(len(row["seeds"])),
        ]
        for row in paired(done, base)
        if row["difference"] is not None
    ]
    if not rows:
        return ""
    head = [
        "trained",
        "cluster",
        "algorithm",
        f"`{base}`",
        "accuracy",
        "difference in points (95 %)",
        "seeds",
    ]
    return markdown(head, rows) + (
        "\n\nHeld out, 0..1, after the last epoch, means over the seeds; differences are paired by seed, "
        "with half the 95 % interval of Student's t. Where the interval holds 0, no difference was shown."
    )


def _points(difference: Mean) -> str:
    half = "(one seed)" if difference.half is None else f"± {100 * difference.half:.2f}"
    return f"{100 * difference.mean:+.2f} {half}"


def label(row: Mapping[str, Any]) -> str:
    """What was trained, in few words."""
    return _label(row["recipe"], row["epochs"])


def label_of(run: Run) -> str:
    """The same of a run."""
    return _label(run.recipe, run.epochs)


def _label(recipe: Sequence[str], epochs: int | None) -> str:
    chosen = dict(zip(recipe[1::2], recipe[2::2], strict=True))
    data = chosen.get("--data", "")
    told = {
        "cifar10": f"CIFAR-10 ({'JPEG q75' if 'jpeg-q75' in data else data})",
    }.get(recipe[0], f"`{recipe[0]}`")
    words = [told, chosen.get("--model"), chosen.get("--precision")]
    words += [f"{chosen['--limit']} images"] if "--limit" in chosen else []
    words += [f"{epochs} epoch{'s' * (epochs > 1)}"] if epochs else []
    return ", ".join(word for word in words if word)


# ---- time ---------------------------------------------------------------------------------------------


def times(experiment: Experiment, found: Sequence[Found]) -> str:
    """Milliseconds and bytes a step of each window, over the whole run that it stands for."""
    base = experiment.algorithms[0]
    rows = []
    for each in found:
        for algorithm in each.parts:
            steady, _ = each.steady(algorithm)
            rows.append(
                [
                    label_of(each.window.run),
                    each.window.run.cluster,
                    f"`{algorithm}`",
                    f"{1e3 * each.seconds(algorithm):.0f}",
                    f"{1e3 * steady:.0f}",
                    f"{each.megabytes(algorithm):.3f}",
                    f"{1 - each.seconds(algorithm) / each.seconds(base):+.1%}",
                    "" if algorithm == base else "{:+.1%} to {:+.1%}".format(*each.saved(algorithm, base)),
                ]
            )
    if not rows:
        return ""
    head = [
        "trained",
        "cluster",
        "algorithm",
        "ms a step",
        STEADY,
        "MB a step and node",
        "time saved",
        f"by blocks, {STEADY}",
    ]
    told = (
        f"\n\nMedians of interleaved blocks in one launch; time saved is against `{base}` in the same one. "
        f"`{COMPUTE_ONLY}` exchanges nothing: nobody can be faster."
    )
    if any(each.of == FIRST for each in found):
        told += (
            f" Seconds are those of {FIRST}. Where ranks wait for each other, all have the same; those of "
            f"`{COMPUTE_ONLY}` do not, and on shared cores the last may take twice as long as the first."
        )
    return markdown(head, rows) + told + withheld(found)


def withheld(found: Sequence[Found]) -> str:
    """In which windows a hypervisor let others have the processors; empty where it did in none."""
    told = [
        f"{each.withheld:.0%} ({label_of(each.window.run)} on {each.window.run.cluster})"
        for each in found
        if each.withheld is not None and each.withheld > DISTURBED
    ]
    if not told:
        return ""
    unknown = sum(each.withheld is None for each in found)
    rest = f"; of {unknown} it is not known" if unknown else ""
    return f" Of the processors' time the hypervisor withheld {', '.join(told)}{rest}."


def checks(evidence: Evidence) -> str:
    """Whether a whole run takes what the windows foretell, and trains what it does on fast links."""
    rows = []
    for done in evidence.whole:
        if done.status != "ok" or not done.steps or done.seconds is None:
            continue
        mine = [each for each in evidence.found if done.run.algorithm in each.parts]
        mine = [each for each in mine if each.window.run == done.run.setting]
        if not mine or (done.run.algorithm == COMPUTE_ONLY and not _one_machine(done, mine)):
            continue
        foretold = done.steps * statistics.median(each.seconds(done.run.algorithm) for each in mine)
        ratio = done.seconds / foretold
        fast = [
            each
            for each in evidence.done
            if each.run.algorithm == done.run.algorithm
            and each.run.seed == done.run.seed
            and each.run.recipe == done.run.recipe
            and each.run.cluster == done.run.cluster.partition("@")[0]
        ]
        rows.append(
            [
                f"`{done.run.algorithm}`",
                str(done.steps),
                f"{foretold:.1f}",
                f"{done.seconds:.1f}",
                f"{ratio:.3f}",
                _verdict(done, mine, ratio, evidence.quick),
                f"{done.accuracy:.4f}",
                f"{fast[0].accuracy:.4f}" if fast and fast[0].accuracy is not None else "-",
            ]
        )
    if not rows:
        return ""
    run = evidence.whole[0].run
    head = ["algorithm", "steps", "foretold s", "took s", "ratio", "within 5 %", "accuracy", "on fast links"]
    return (
        f"{label_of(run)} on {run.cluster}, seed {run.seed}, from the first step to the last.\n\n"
        + markdown(head, rows)
        + f"\n\nWhat `{COMPUTE_ONLY}` is off by is the machine's own unsteadiness between the two."
    )


def _one_machine(done: Done, windows: Sequence[Found]) -> bool:
    return all(done.hardware.get(fact) == each.hardware.get(fact) for each in windows for fact in MACHINE)


def _verdict(done: Done, windows: Sequence[Found], ratio: float, quick: bool) -> str:
    if not _one_machine(done, windows):
        return "another machine"
    if quick or (done.steps or 0) < ENOUGH:
        return "not judged"
    return "yes" if abs(ratio - 1) <= CLOSE else "**no**"


def _failures(evidence: Evidence) -> str:
    windows = [
        f"* window, {label_of(each.window.run)} on {each.window.run.cluster}: {each.error}"
        for each in evidence.found
        if each.error is not None
    ]
    return "\n".join(filter(None, [failed((*evidence.done, *evidence.whole)), *windows]))


def failed(done: Iterable[Done]) -> str:
    """A list of the runs that failed, each with the first line of why; empty if none did."""
    return "\n".join(
        f"* `{each.run.algorithm}`, {label_of(each.run)} on {each.run.cluster}, seed {each.run.seed}: "
        f"{(each.error or '').strip().partition(chr(10))[0]}"
        for each in done
        if each.status != "ok"
    )
