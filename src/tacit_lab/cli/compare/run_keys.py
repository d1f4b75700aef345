"""Which runs a comparison needs: of each algorithm its seeds, and before them those that choose a rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.records import CHOOSING, COMPUTE_ONLY, EndRecord, RunKey
from tacit_lab.study.jobs import Ended, StudyRun
from tacit_lab.study.search import Rule, Study


def place(options: CompareOptions, ends: Mapping[RunKey, EndRecord], begun: int) -> str:
    """Which training is begun next, in words; while rates are searched nobody knows how many there will be.

    Args:
        begun: how many are under way.
    """
    due = list(missing(options, ends))
    done = len([end for end in ends.values() if end.status == "ok"])
    searched = {key.algorithm for key in due if key.seed == CHOOSING}
    most = done + len(due) + len(searched) * len(options.seeds)
    return f"training {done + begun + 1} of {'about ' if searched else ''}{most}"


def missing(options: CompareOptions, ends: Mapping[RunKey, EndRecord]) -> Iterator[RunKey]:
    """What is still to be run, given what has come of the runs until now: take the first, and ask again.

    Rates are chosen as by `tacit study`. Of each algorithm all seeds are trained with the one that was best.
    """
    study = Study({options.recipe: Rule(validation=options.validation)}, rates=options.rates)
    done: dict[StudyRun, Ended] = {}
    for key, end in ends.items():
        if end.status == "ok":
            run = StudyRun(options.recipe, key.algorithm, 0, key.seed, key.rate)
            done[run] = Ended.of(run, end)
    rates: dict[str, float] = {}
    for strategy in options.strategies:
        of = (done, options.recipe, strategy.name, 0)
        if (rate := study.best(*of)) is not None:
            rates[strategy.name] = rate
        else:
            searched = (run for run in study.searched(*of) if run not in done)
            yield from (RunKey(run.arm, run.seed, run.rate) for run in searched)
    due = [RunKey(name, seed, rate) for seed in options.seeds for name, rate in rates.items()]
    alone = not options.in_process and options.churn is None
    due += [RunKey(COMPUTE_ONLY, options.seeds[0], 1.0)] if alone else []
    yield from (key for key in due if key not in ends or ends[key].status != "ok")
