"""The rule by which each algorithm gets its learning rate, what trainings that needs, and the gaps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from tacit_lab.intervals import Mean
from tacit_lab.records import CHOOSING
from tacit_lab.study.jobs import Ended, StudyRun, uncoded

RATES = (0.5, 1.0, 2.0)
"""What the task's own learning rate is multiplied by, to choose from; more where the best is at an end."""
BESIDE_SGD: Mapping[str, float] = {"signsgd": 1 / 128, "demo": 1 / 128, "dion": 1 / 16}
"""These move parameters by the rate itself, whatever the gradient: their rates are so much smaller."""
LIMITS = (1 / 1024, 16.0)
Wanted = Sequence[tuple[str, str, int]]
"""What is to be known: of each (task, arm, steps) the gap."""
Done = Mapping[StudyRun, Ended]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the learning rates of a task are chosen.

    Attributes:
        searched: steps up to which a training's learning rate is searched among the rates; that of a longer
            one is searched around the rate that was best there.
        longest: the longest training whose learning rate is searched; a longer one takes this one's.
        choosing: how many other seeds judge the rates that seed `CHOOSING` does not tell apart, in trainings
            of up to `searched` steps. They are those of the claims, by the validation split.
        validation: the samples of the validation split; 0 where there is none, and losses count.
        scales: what the rates of algorithms are multiplied by whose steps are of another size.
    """

    searched: int = 600
    longest: int = 2400
    choosing: int = 0
    validation: int = 0
    scales: Mapping[str, float] = field(default_factory=lambda: BESIDE_SGD)


@dataclass(frozen=True)
class Study:
    """What is compared with what, and how rates are chosen.

    Attributes:
        rules: of each task.
        plain: the arm to which gaps are.
        rates: to choose from; a single one is taken as it is.
        like: of arms that are searched around the best rate of another one, which that is.
        fuller: by which plain training's rate, and those of others in `like`, are chosen.
    """

    rules: Mapping[str, Rule]
    plain: str = "dense"
    rates: tuple[float, ...] = RATES
    like: Mapping[str, str] = field(default_factory=dict)
    fuller: Study | None = None

    # ---- learning rates -------------------------------------------------------------------------------

    def searched(self, done: Done, task: str, arm: str, steps: int) -> list[StudyRun]:
        """The trainings by which an arm's learning rate is chosen: until the best is between two others.

        Where one seed does not tell rates apart, the task's other seeds train with each of those too.
        """
        rule = self.rules[task]
        scale = rule.scales.get(arm.partition(":")[0], 1.0)
        rates, seeds = tuple(scale * rate for rate in self.rates), rule.choosing
        middle = self._relatives(done, task, arm, steps)
        if middle is not None:
            rates = (middle / 2, middle, 2 * middle)
        steps = min(steps, max(rule.searched, rule.longest))
        tried_with = partial(StudyRun, task, arm, steps, CHOOSING)
        if steps > rule.searched:
            tried = sorted((job for job in done if job == tried_with(job.rate)), key=lambda job: job.rate)
            if tried and self._beyond(done, tried) is None:
                return tried
            middle = self.best(done, task, arm, rule.searched)
            if middle is None:
                return self.searched(done, task, arm, rule.searched)
            rates, seeds = (middle / 2, middle, 2 * middle), 0
        jobs = [tried_with(rate) for rate in rates if LIMITS[0] <= rate <= LIMITS[1]]
        while all(job in done for job in jobs):
            alike = self._alike([done[job] for job in jobs])
            again = [replace(each.job, seed=seed) for each in alike for seed in range(seeds)]
            found = [*jobs, *again]
            if not all(job in done for job in again) or (beyond := self._beyond(done, found)) is None:
                return found
            jobs.append(tried_with(beyond))
        return jobs

    def best(self, done: Done, task: str, arm: str, steps: int) -> float | None:
        """The rate that was best, and with which no seed has collapsed; None while it is searched."""
        if self.fuller is not None and arm == self.plain:
            return self.fuller.best(done, task, arm, steps)
        if len(self.rates) == 1:
            return self.rates[0]
        for twin in _twins(done, task, arm):
            jobs = self.searched(done, task, twin, steps)
            if all(job in done for job in jobs):
                break
        else:
            return None
        tried = self._judged(done, jobs)
        stable = [
            each.job.rate for each in tried if not _collapsed(done, replace(each.job, steps=steps), tried[0])
        ]
        return stable[0] if stable else tried[-1].job.rate

    def chosen(self, done: Done, task: str, arm: str, steps: int) -> float | None:
        """As `best`; while it is searched the best of what was tried, or the relative's."""
        best = self.best(done, task, arm, steps)
        if best is not None or self.fuller is None:
            return best
        tried = [
            ended for job, ended in done.items() if job == StudyRun(task, arm, steps, CHOOSING, job.rate)
        ]
        return self.by_merit(tried)[0].job.rate if tried else self._relatives(done, task, arm, steps)

    def _relatives(self, done: Done, task: str, arm: str, steps: int) -> float | None:
        """The best rate of the arm that this one is like."""
        if self.fuller is None or arm not in self.like:
            return None
        return self.fuller.best(done, task, self.like[arm], steps)

    def by_merit(self, tried: Sequence[Ended], seeds: int = 1) -> list[Ended]:
        """Trainings with several rates, or means of as many `seeds`, the best first.

        Of those whose accuracy on the validation split is within one standard error of the highest, which so
        few samples do not distinguish, the one with the lowest loss in training; then the others by that
        accuracy.
        """
        highest = max(each.validation for each in tried)
        error = self._error(highest, tried[0].job.task) / math.sqrt(seeds)
        alike = [each for each in tried if each.validation >= highest - error]
        others = [each for each in tried if each.validation < highest - error]
        return [
            *sorted(alike, key=lambda each: each.loss),
            *sorted(others, key=lambda each: -each.validation),
        ]

    def _alike(self, tried: Sequence[Ended]) -> Sequence[Ended]:
        """Those within two standard errors of a difference of the best; none where that is one alone."""
        highest = max(each.validation for each in tried)
        error = self._error(highest, tried[0].job.task)
        found = [each for each in tried if each.validation >= highest - 2 * math.sqrt(2) * error]
        return found if len(found) > 1 else []

    def _beyond(self, done: Done, jobs: Sequence[StudyRun]) -> float | None:
        """The rate that is to be tried next, as the best is at an end; None where the search is over."""
        found, tried = self._judged(done, jobs)[0].job.rate, {job.rate for job in jobs}
        if found in (min(tried), max(tried)):
            beyond = found / 2 if found == min(tried) else 2 * found
            return beyond if LIMITS[0] <= beyond <= LIMITS[1] else None
        return None

    def _judged(self, done: Done, jobs: Sequence[StudyRun]) -> list[Ended]:
        """What came of each rate, in the mean of the seeds that it was tried with; the best first.

        One that was tried with one seed, where others were with more, was worse with that: it stands behind
        them.
        """
        tried = dict.fromkeys(job.rate for job in jobs)
        rates = [[done[job] for job in jobs if job.rate == rate] for rate in tried]
        means = [
            replace(
                some[0],
                validation=statistics.fmean(each.validation for each in some),
                loss=statistics.fmean(each.loss for each in some),
            )
            for some in rates
        ]
        most = max(len(some) for some in rates)
        clear = [mean for mean, some in zip(means, rates, strict=True) if len(some) == most]
        return [*self.by_merit(clear, most), *(mean for mean in means if mean not in clear)]

    def _error(self, accuracy: float, task: str) -> float:
        """The standard error of an accuracy on the validation split; 0 where there is none."""
        samples = self.rules[task].validation
        return math.sqrt(accuracy * (1 - accuracy) / samples) if samples and 0 < accuracy < 1 else 0.0

    # ---- what is to be trained ------------------------------------------------------------------------

    def missing(self, done: Done, wanted: Wanted, seeds: Sequence[int]) -> Iterator[StudyRun]:
        """What is still to be trained; the seeds of an arm as soon as its rate is known."""
        for task, arm, steps in wanted:
            if self.best(done, task, arm, steps) is None:
                yield from (job for job in self.searched(done, task, arm, steps) if job not in done)
        for seed in seeds:
            for task, arm, steps in wanted:
                rate = self.best(done, task, arm, steps)
                if rate is not None and ended_as(done, job := StudyRun(task, arm, steps, seed, rate)) is None:
                    yield job

    def there(self, done: Done) -> list[tuple[str, str, int]]:
        """Each (task, arm, steps) that was trained, in the order of the tasks, and of their lengths."""
        found = {(job.task, job.arm, job.steps) for job in done if job.seed != CHOOSING}
        # Of an arm with an entropy coder one training is enough, of whichever seed.
        found |= {
            (job.task, job.arm, job.steps) for job in done if (job.task, uncoded(job.arm), job.steps) in found
        }
        tasks = list(self.rules)
        return sorted(found, key=lambda each: (tasks.index(each[0]), each[2], each[1] != self.plain, each[1]))

    # ---- what came of it ------------------------------------------------------------------------------

    def rows(self, done: Done, wanted: Wanted, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """A row for each of them that has a pair of seeds; `gap` is to plain training."""
        found = []
        for task, arm, steps in wanted:
            mine, plain = self.chosen(done, task, arm, steps), self.best(done, task, self.plain, steps)
            if mine is None or plain is None:
                continue
            pairs = [
                (a, b)
                for seed in seeds
                if seed != CHOOSING
                and (a := ended_as(done, StudyRun(task, arm, steps, seed, mine))) is not None
                and (b := done.get(StudyRun(task, self.plain, steps, seed, plain))) is not None
            ]
            shares = [_share(a, b) for a, b in pairs]
            accuracy = Mean.of([a.accuracy for a, _ in pairs])
            gap = Mean.of([a.accuracy - b.accuracy for a, b in pairs])
            if accuracy is None or gap is None:
                continue
            where = [each.hardware for pair in pairs for each in pair]
            dates = [str(each["date"]) for each in where if "date" in each]
            found.append(
                {
                    "task": task,
                    "arm": arm,
                    "steps": steps,
                    "rate": mine,
                    "bytes": None if None in shares else statistics.fmean(filter(None, shares)),
                    "by_loss": pairs[0][0].by_loss,
                    "on_cluster": pairs[0][0].on_cluster,
                    "seconds": statistics.fmean(a.seconds for a, _ in pairs),
                    "accuracy": asdict(accuracy),
                    "gap": asdict(gap),
                    "loss_gap": statistics.mean(a.loss - b.loss for a, b in pairs),
                    "on": sorted({str(each.get("gpu", each.get("cpu", "CPU"))) for each in where}),
                    "dates": [min(dates), max(dates)] if dates else [],
                }
            )
        return found


def _share(mine: Ended, plain: Ended) -> float | None:
    """Of plain training's bytes; None where a script's could not be counted."""
    if not mine.on_cluster:
        return mine.share
    return mine.megabytes / plain.megabytes if mine.megabytes is not None and plain.megabytes else None


def ended_as(done: Done, job: StudyRun) -> Ended | None:
    """What came of a training; of one with an entropy coder, by one without and the bytes of another seed."""
    if job in done:
        return done[job]
    plain = done.get(replace(job, arm=uncoded(job.arm)))
    if plain is None:
        return None
    shares = [each.share for other, each in done.items() if other.differs_by_seed(job)]
    return replace(plain, job=job, share=statistics.mean(shares)) if shares else None


def _twins(done: Done, task: str, arm: str) -> Iterator[str]:
    """The arm, and those that differ from it by an entropy coder alone, which have its learning rate."""
    yield from dict.fromkeys((arm, uncoded(arm)))
    yield from sorted(
        {job.arm for job in done if job.task == task and uncoded(job.arm) == uncoded(arm)}
        - {arm, uncoded(arm)}
    )


def _collapsed(done: Done, chosen: StudyRun, leading: Ended) -> bool:
    """Whether a training with this rate has ended at less than half of the best accuracy, if there is one."""
    return leading.accuracy > 0 and any(
        ended.accuracy < leading.accuracy / 2
        for job, ended in done.items()
        if job.differs_by_seed(chosen) and job.seed != CHOOSING
    )


def table(found: Sequence[Mapping[str, Any]], plain: str = "dense") -> str:
    """Rows as text, task by task and length by length; the arm to which gaps are has none."""
    lines: list[str] = []
    for task, steps in dict.fromkeys((row["task"], row["steps"]) for row in found):
        here = [row for row in found if (row["task"], row["steps"]) == (task, steps)]
        by_loss = here[0]["by_loss"]
        judged, unit = ("- loss", "gap") if by_loss else ("accuracy", "gap, points")
        lines += ["", f"{task}, {steps} steps", f"{'':44} {'rate':5} {'bytes':>7} {judged:>8} {unit:>16}"]
        for row in here:
            half, gap, scale = row["gap"]["half"], row["gap"]["mean"], 1 if by_loss else 100
            width = "one seed" if half is None else f"± {scale * half:.2f}"
            sent = f"{'–':>7}" if row["bytes"] is None else f"{row['bytes']:7.2%}"
            shown = f"{'–':>7}" if row["arm"] == plain else f"{scale * gap:+7.2f} {width:>8}"
            lines.append(f"{row['arm']:44} x{row['rate']:<4g} {sent} {row['accuracy']['mean']:8.4f} {shown}")
    return "\n".join(lines).strip()
