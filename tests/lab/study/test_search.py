"""Gaps to plain training: what is trained, in which order, and what is said of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit_lab.records import CHOOSING
from tacit_lab.study import jobs, search
from tacit_lab.study.jobs import Ended, StudyRun
from tacit_lab.study.search import Rule, Study

STUDY = Study(
    {
        "cifar10": Rule(longest=9600, choosing=3, validation=2000),
        "mnist": Rule(validation=2000),
        "text": Rule(longest=600),
        "digits": Rule(validation=2000),
    }
)
WANTED = [("digits", "dense", 66), ("digits", "topk", 66)]


def ended(job: StudyRun, found: float, validation: float = 0.5, loss: float = 0.1) -> Ended:
    return Ended(job, found, validation, loss, 0.03, 1.0, {})


def searched(arm: str, validations: tuple[float, float, float]) -> dict[StudyRun, Ended]:
    return {
        job: ended(job, 0.0, each)
        for job, each in zip(STUDY.searched({}, "digits", arm, 66), validations, strict=True)
    }


def test_an_arm_takes_the_rate_that_is_best_on_the_validation_split() -> None:
    done = searched("topk", (0.7, 0.9, 0.8))
    assert STUDY.best(done, "digits", "topk", 66) == 1.0
    assert STUDY.best(done, "digits", "dense", 66) is None
    done.popitem()
    assert STUDY.best(done, "digits", "topk", 66) is None, "not before all were tried"


def test_the_search_goes_on_where_the_best_is_at_an_end() -> None:
    done = searched("topk", (0.7, 0.8, 0.9))
    assert STUDY.best(done, "digits", "topk", 66) is None
    *_, beyond = STUDY.searched(done, "digits", "topk", 66)
    assert beyond.rate == 4.0
    assert STUDY.best(done | {beyond: ended(beyond, 0.0, 0.6)}, "digits", "topk", 66) == 2.0
    done |= {beyond: ended(beyond, 0.0, 1.0)}
    assert STUDY.searched(done, "digits", "topk", 66)[-1].rate == 8.0


def test_the_rates_of_a_step_that_is_a_sign_are_far_smaller() -> None:
    rates = {arm: [job.rate for job in STUDY.searched({}, "digits", arm, 66)] for arm in ("topk", "signsgd")}
    assert rates == {"topk": [0.5, 1.0, 2.0], "signsgd": [0.5 / 128, 1 / 128, 2 / 128]}
    by_adam = Study({"text": Rule(scales={"demo": 0.5})})
    assert [job.rate for job in by_adam.searched({}, "text", "demo", 66)] == [0.25, 0.5, 1.0]
    assert next(job.rate for job in STUDY.searched({}, "digits", "demo:k=8", 66)) == 0.5 / 128


def test_where_one_seed_is_trained_an_arm_is_searched_around_the_rate_of_a_relative() -> None:
    once = Study({"digits": Rule()}, rates=(2.0, 4.0), like={"oktopk": "topk"}, fuller=STUDY)
    done = searched("topk", (0.7, 0.9, 0.8)) | searched("dense", (0.9, 0.95, 0.8))
    tried = once.searched(done, "digits", "oktopk", 66)
    assert [job.rate for job in tried] == [0.5, 1.0, 2.0]
    done |= {job: ended(job, 0.0, each) for job, each in zip(tried, (0.7, 0.9, 0.8), strict=True)}
    wanted = [("digits", "oktopk", 66), ("digits", "dense", 66)]
    missing = [*once.missing(done, wanted, range(1))]
    assert missing == [StudyRun("digits", arm, 66, 0, 1.0) for arm in ("oktopk", "dense")]
    few = {job: each for job, each in done.items() if job.arm != "oktopk"}
    assert once.chosen(few, "digits", "oktopk", 66) == 1.0, "the relative's, before anything was tried"
    few |= {tried[2]: ended(tried[2], 0.0, 0.8)}
    assert once.chosen(few, "digits", "oktopk", 66) == 2.0
    assert once.best(few, "digits", "oktopk", 66) is None
    assert STUDY.chosen(few, "digits", "oktopk", 66) is None
    alone = [job.rate for job in once.missing(done, [("digits", "gtopk", 66)], range(1))]
    assert alone == [2.0, 4.0], "who has no relative is searched, among few"
    done |= {job: ended(job, each) for job, each in zip(missing, (0.7, 0.8), strict=True)}
    (row, _) = once.rows(done, wanted, range(1))
    assert (row["rate"], round(row["gap"]["mean"], 6), row["gap"]["half"]) == (1.0, -0.1, None)


def test_of_rates_that_the_validation_split_does_not_tell_apart_the_loss_decides() -> None:
    """0.985 and 0.983 of 2,000 images are 4 images apart, and one standard error is 5."""
    jobs = STUDY.searched({}, "digits", "topk", 66)
    found = [(0.983, 0.02), (0.985, 0.03), (0.97, 0.01)]
    done = {job: ended(job, 0.0, *each) for job, each in zip(jobs, found, strict=True)}
    assert [each.job.rate for each in STUDY.by_merit([*done.values()])] == [0.5, 1.0, 2.0]
    *_, beyond = STUDY.searched(done, "digits", "topk", 66)
    assert beyond.rate == 0.25, "the search goes on beside what is chosen"
    done |= {beyond: ended(beyond, 0.0, 0.984, 0.04)}
    assert STUDY.best(done, "digits", "topk", 66) == 0.5


def test_where_one_seed_does_not_tell_rates_apart_more_seeds_do() -> None:
    def tried(job: StudyRun, validation: float) -> dict[StudyRun, Ended]:
        return {job: ended(job, 0.0, validation)}

    _, one, two = jobs = STUDY.searched({}, "cifar10", "topk", 600)
    done = {job: ended(job, 0.0, each) for job, each in zip(jobs, (0.5, 0.57, 0.56), strict=True)}
    assert STUDY.best(done, "cifar10", "topk", 600) is None
    again = STUDY.searched(done, "cifar10", "topk", 600)[3:]
    assert again == [replace(job, seed=seed) for job in (one, two) for seed in range(3)]
    for job in again:
        done |= tried(job, 0.55 if job.rate == 1.0 else 0.58)
    *_, beyond = STUDY.searched(done, "cifar10", "topk", 600)
    assert beyond.rate == 4.0, "the mean of four seeds is at an end now"
    done |= tried(beyond, 0.5)
    assert STUDY.best(done, "cifar10", "topk", 600) == 2.0
    clear = {job: ended(job, 0.0, each) for job, each in zip(jobs, (0.5, 0.57, 0.5), strict=True)}
    assert STUDY.searched(clear, "cifar10", "topk", 600) == jobs
    assert STUDY.best(clear, "cifar10", "topk", 600) == 1.0


def test_one_seed_is_not_held_against_the_mean_of_more() -> None:
    jobs = STUDY.searched({}, "cifar10", "topk", 600)
    done = {job: ended(job, 0.0, each) for job, each in zip(jobs, (0.535, 0.57, 0.56), strict=True)}
    for job in STUDY.searched(done, "cifar10", "topk", 600)[3:]:
        done[job] = ended(job, 0.0, 0.52 if job.rate == 1.0 else 0.5)
    assert STUDY.best(done, "cifar10", "topk", 600) == 1.0, (
        "0.5 is at 0.535 by a seed with which 1 is at 0.57"
    )


def test_a_longer_training_is_not_searched_again_when_a_shorter_one_has_another_best() -> None:
    rates = {0.5: 0.5, 1.0: 0.6, 2.0: 0.7, 4.0: 0.8, 8.0: 0.6}
    done = {
        job: ended(job, 0.0, v)
        for r, v in rates.items()
        for job in [StudyRun("mnist", "topk", 600, CHOOSING, r)]
    }
    longer = {1.0: 0.8, 2.0: 0.9, 4.0: 0.85}
    done |= {
        job: ended(job, 0.0, v)
        for r, v in longer.items()
        for job in [StudyRun("mnist", "topk", 2400, CHOOSING, r)]
    }
    assert STUDY.best(done, "mnist", "topk", 600) == 4.0
    assert STUDY.best(done, "mnist", "topk", 2400) == 2.0


def test_a_task_without_such_a_split_goes_by_the_loss() -> None:
    jobs = STUDY.searched({}, "text", "dense", 600)
    losses = (2.2, 2.0, 2.1)
    done = {job: ended(job, 0.0, -loss, loss) for job, loss in zip(jobs, losses, strict=True)}
    assert STUDY.best(done, "text", "dense", 600) == 1.0


def test_rates_are_searched_first_and_with_a_seed_of_their_own() -> None:
    assert {job.seed for job in STUDY.missing({}, WANTED, range(3))} == {CHOOSING}
    done = searched("dense", (0.7, 0.9, 0.8))
    jobs = list(STUDY.missing(done, WANTED, range(3)))
    assert jobs[:3] == STUDY.searched({}, "digits", "topk", 66)
    assert jobs[3:] == [StudyRun("digits", "dense", 66, seed, 1.0) for seed in range(3)]


def test_in_longer_trainings_rates_are_searched_around_the_one_that_was_best_in_the_shortest() -> None:
    assert {job.steps for job in STUDY.searched({}, "digits", "topk", 2400)} == {600}
    rates = {0.5: 0.7, 1.0: 0.8, 2.0: 0.9, 4.0: 0.8}
    done = {
        job: ended(job, 0.0, each)
        for job, each in ((StudyRun("digits", "topk", 600, CHOOSING, r), v) for r, v in rates.items())
    }
    assert STUDY.best(done, "digits", "topk", 600) == 2.0
    assert STUDY.best(done, "digits", "topk", 2400) is None
    longer = STUDY.searched(done, "digits", "topk", 2400)
    assert [(job.steps, job.rate) for job in longer] == [(2400, 1.0), (2400, 2.0), (2400, 4.0)]
    assert STUDY.searched(done, "digits", "topk", 9600) == longer, "none is longer than 2,400 steps"
    done |= {job: ended(job, 0.0, each) for job, each in zip(longer, (0.9, 0.8, 0.7), strict=True)}
    assert STUDY.searched(done, "digits", "topk", 2400)[-1].rate == 0.5


def test_a_rate_with_which_a_seed_collapses_is_given_up_for_all() -> None:
    done = searched("topk", (0.7, 0.9, 0.8))
    done = {job: replace(each, accuracy=each.validation) for job, each in done.items()}
    good, bad = StudyRun("digits", "topk", 66, 0, 1.0), StudyRun("digits", "topk", 66, 1, 1.0)
    assert STUDY.best(done | {good: ended(good, 0.9)}, "digits", "topk", 66) == 1.0
    done |= {good: ended(good, 0.9), bad: ended(bad, 0.1)}
    assert STUDY.best(done, "digits", "topk", 66) == 2.0
    elsewhere = {replace(bad, arm="dense"): ended(bad, 0.1), replace(bad, steps=67): ended(bad, 0.1)}
    assert STUDY.best({**done, bad: ended(bad, 0.8)} | elsewhere, "digits", "topk", 66) == 1.0


def test_a_loss_does_not_collapse() -> None:
    done = searched("topk", (-2.0, -1.0, -3.0))
    done = {job: replace(each, accuracy=each.validation) for job, each in done.items()}
    one = StudyRun("digits", "topk", 66, 0, 1.0)
    assert STUDY.best(done | {one: ended(one, -1.1)}, "digits", "topk", 66) == 1.0


def test_gaps_are_paired_by_seed() -> None:
    done = searched("dense", (0.8, 0.9, 0.8)) | searched("topk", (0.7, 0.9, 0.8))
    for arm, rate, found in [("dense", 1.0, (0.9, 0.8, 0.7)), ("topk", 1.0, (0.8, 0.7))]:
        done |= {
            job: ended(job, each)
            for seed, each in enumerate(found)
            for job in [StudyRun("digits", arm, 66, seed, rate)]
        }
    plain, topk = STUDY.rows(done, WANTED, range(3))
    assert plain["gap"]["mean"] == 0
    assert plain["gap"]["count"] == 3
    assert topk["gap"]["mean"] == pytest.approx(-0.1)
    assert topk["gap"]["count"] == 2
    assert topk["gap"]["half"] == pytest.approx(0, abs=1e-9)
    assert "-10.00" in search.table([plain, topk])


def test_the_seed_that_rates_are_chosen_by_is_in_no_gap() -> None:
    done = searched("topk", (0.7, 0.9, 0.8)) | searched("dense", (0.7, 0.9, 0.8))
    done |= {
        job: ended(job, 0.9) for arm in ("dense", "topk") for job in [StudyRun("digits", arm, 66, 0, 1.0)]
    }
    (_, topk) = STUDY.rows(done, WANTED, range(CHOOSING + 5))
    assert topk["gap"]["count"] == 1


def test_of_an_arm_with_a_coder_one_training_is_enough() -> None:
    coded = "lowbit:bits=2,entropy=true"
    seeds = [StudyRun("digits", "lowbit:bits=2", 66, seed, 1.0) for seed in range(3)]
    done = {job: ended(job, 0.9) for job in [*seeds, StudyRun("digits", "lowbit", 66, CHOOSING, 1.0)]}
    assert STUDY.there(done) == [("digits", "lowbit:bits=2", 66)]
    once = StudyRun("digits", coded, 66, CHOOSING, 1.0)
    done[once] = replace(ended(once, 0.8), share=0.02)
    assert ("digits", coded, 66) in STUDY.there(done)
    found = search.ended_as(done, replace(once, seed=1))
    assert found is not None
    assert (found.accuracy, found.share) == (0.9, 0.02)


def test_an_arm_without_a_coder_takes_the_rate_of_the_one_with_it() -> None:
    done = searched("lowbit:entropy=true", (0.7, 0.9, 0.8))
    assert STUDY.best(done, "digits", "lowbit", 66) == 1.0
    done.popitem()
    assert STUDY.best(done, "digits", "lowbit", 66) is None


def test_a_single_rate_is_taken_as_it_is() -> None:
    one = replace(STUDY, rates=(2.0,))
    assert one.best({}, "digits", "topk", 66) == 2.0
    assert [*one.missing({}, WANTED, [0])] == [
        StudyRun("digits", arm, 66, 0, 2.0) for arm in ("dense", "topk")
    ]


def test_a_file_goes_on_behind_a_line_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    one, two = (ended(StudyRun("digits", "topk", 66, seed, 1.0), 0.9) for seed in (0, 1))
    jobs.append(file, one)
    with file.open("a") as writer:
        writer.write('{"job": ')
    assert jobs.read(file) == {one.job: one}
    jobs.append(file, two)
    assert jobs.read(file) == {one.job: one, two.job: two}
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(ConfigError, match=r"runs.jsonl, line 1: '{}' is no record of a training"):
        jobs.read(file)


def test_what_was_trained_is_read_back() -> None:
    one = ended(StudyRun("digits", "topk", 66, 0, 1.0), 0.9)
    assert Ended.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("arm", "plain"),
    [
        ("lowbit:entropy=true", "lowbit"),
        ("lowbit:bits=2,entropy=true", "lowbit:bits=2"),
        ("lowbit:entropy=true,bits=2", "lowbit:bits=2"),
        ("lowbit:bits=2,entropy=true,sync_every=2", "lowbit:bits=2,sync_every=2"),
        ("lowbit:bits=2", "lowbit:bits=2"),
    ],
)
def test_an_entropy_coder_leaves_the_arm_that_it_is_put_around(arm: str, plain: str) -> None:
    assert jobs.uncoded(arm) == plain


def test_with_an_entropy_coder_one_training_tells_the_bytes_and_the_others_are_those_without() -> None:
    done = searched("dense", (0.8, 0.9, 0.8)) | searched("lowbit", (0.7, 0.9, 0.8))
    done |= {
        job: ended(job, each)
        for arm, found in (("dense", (0.9, 0.8)), ("lowbit", (0.8, 0.75)))
        for seed, each in enumerate(found)
        for job in [StudyRun("digits", arm, 66, seed, 1.0)]
    }
    wanted = [("digits", "dense", 66), ("digits", "lowbit:entropy=true", 66)]
    first = StudyRun("digits", "lowbit:entropy=true", 66, 0, 1.0)
    assert list(STUDY.missing(done, wanted, range(2))) == [first, replace(first, seed=1)]
    assert len(STUDY.rows(done, wanted, range(2))) == 1, "nothing is known of its bytes"
    done[first] = replace(ended(first, 0.8), share=0.03)
    assert list(STUDY.missing(done, wanted, range(2))) == []
    _, coded = STUDY.rows(done, wanted, range(2))
    assert coded["bytes"] == 0.03
    assert coded["accuracy"]["mean"] == pytest.approx(0.775)
    assert coded["gap"]["mean"] == pytest.approx(-0.075)
