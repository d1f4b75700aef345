"""Which algorithm stands in the decision table, and where the table is put; and what is on the map."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import choosing
import choosing_map
from choosing import BEGIN, COMPRESSED, END, IMAGES, PAGE, Setting, found_of, placed, settings, table
from experiments import PRECISIONS, Scale
from paired import RESULTS
from runs import COMPUTE_ONLY
from tacit import algorithms
from tacit.planning.profile import Profile
from windows import Found, parts

DATA = "/somewhere/cifar10-jpeg-q75.tar.xz"


def found(setting: Setting, seconds: dict[str, float]) -> Found:
    window = setting.window(DATA, 3)
    times = {COMPUTE_ONLY: 0.1, **dict.fromkeys(window.algorithms, 0.5), **seconds}
    return Found(window.key, 22, {name: [(1.0, [each], 0.0)] for name, each in times.items()}, {})


def test_the_fastest_of_each_kind_stands_in_the_table() -> None:
    (setting,) = settings(Scale(quick=True))
    text = table([(setting, found(setting, {"ddp": 1.0, "qsgd": 0.25, "ednncomm:sync_every=16": 0.125}))])
    assert text.splitlines()[2] == (
        "| 1 million | 2x2@100mbit | 1000 ms | 90% "
        "| `bf16` 2.0x | `qsgd` 4.0x | `ednncomm:sync_every=16` 8.0x | 10x |"
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_table_holds_all_that_was_measured_images_or_not(tmp_path: Path, precision: str) -> None:
    every = [*settings(Scale(data=DATA, precision=precision))]
    path = tmp_path / "w.jsonl"
    made = [replace(found(each, {}), hardware={"date": "2026-01-02", "commit": "abc"}) for each in every]
    path.write_text("".join(f"{each.to_json()}\n" for each in made[1:]))
    held = found_of(path, Scale(data=IMAGES))
    assert [setting for setting, _ in held] == every[1:]
    assert "Measured on 2026-01-02, at abc" in table(held)


def test_what_is_measured_can_be_attached_and_fits_one_launch() -> None:
    made = [*settings(Scale(data=DATA))]
    assert len({(each.parameters, each.cluster) for each in made}) == len(made) == 10
    assert len([*settings(Scale())]) == 6
    for setting in made:
        for algorithm in setting.window(DATA, 3).algorithms:
            for part in parts(algorithm, 5, 22):
                algorithms.parse(part.text)
        assert ("ednncomm:sync_every=16" in setting.seldom) is (setting.nodes == "2x2")


def test_the_table_is_put_in_its_place() -> None:
    page = f"before\n{BEGIN}old\n{END}\nafter\n"
    once = placed(page, "new")
    assert once == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert placed(once, "new") == once
    assert BEGIN in PAGE.read_text()
    assert END in PAGE.read_text()
    with pytest.raises(SystemExit, match="has no place for the table"):
        placed("nothing", "new")


def test_the_best_is_among_those_that_were_measured() -> None:
    (setting,) = settings(Scale(quick=True))
    assert set(COMPRESSED) <= set(setting.window(None, 2).algorithms)
    assert choosing.QUICK_BLOCKS < choosing.BLOCKS


# ---- the map ------------------------------------------------------------------------------------------


def trained(arm: str, steps: int, gap: float) -> dict[str, object]:
    return {"task": "mnist", "arm": arm, "steps": steps, "gap": {"mean": gap, "half": 0.001}}


def test_on_a_map_is_what_lost_at_most_half_a_point_in_the_longest_training() -> None:
    rows = [
        trained("dense", 600, 0.0),
        trained("qsgd", 600, -0.005),
        trained("lowbit:bits=2,entropy=true", 600, -0.02),
        trained("lowbit:bits=2,entropy=true", 2400, 0.001),
        trained("int8", 600, 0.0),
        trained("int8", 2400, -0.006),
        trained("topk:ratio=0.01", 600, -0.0051),
        trained("randomk", 600, 0.0),
        trained("ednncomm", 600, 0.0),
        trained("dgc:warmup_steps={tenth}", 600, 0.0),
    ]
    assert choosing_map.allowed(rows, "mnist", 600) == ["ddp", "qsgd", "int8"]
    assert choosing_map.allowed(rows, "mnist", 2400) == ["ddp", "qsgd", "lowbit:bits=2"]


def test_the_clock_says_today_what_the_map_has() -> None:
    """For some; if the clock is another, `choosing.py --map` makes the map anew."""
    profile = Profile.load(RESULTS / "choosing-map-digits.json")
    known = json.loads(choosing_map.FILE.read_text())["steps"]["digits"]
    for cluster in ("4x1@100mbit,30ms", "4x1@1gbit,0.1ms"):
        for text in ("ddp", "qsgd", "lowbit:bits=2,sync_every=3", "streaming-diloco"):
            found = choosing_map.steps_on(profile, cluster, [text])[text]
            assert found == pytest.approx(known[cluster][text], rel=0.02)
