"""`tacit plan` and `tacit diagnose` on the profile of a GPU that was made up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from in_process_command import called
from made_up_gpu import MEASURED, SAVED, compared, made, on_the_h100
from tacit.planning.profile import GpuProfile, Profile
from tacit_lab.cli.profile import _told


@pytest.fixture(scope="module")
def profile() -> Profile:
    return Profile.load(SAVED)


def told(*words: str) -> dict[str, Any]:
    done = called(*words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def seconds(cluster: str, *words: str) -> dict[str, float]:
    found = told("plan", "--profile", str(SAVED), "--cluster", cluster, *words)
    return {each["algorithm"]: each["seconds"] for each in found["predictions"]}


def test_it_is_what_its_script_makes(profile: Profile) -> None:
    assert profile == made()
    assert "made up" in profile.processor
    assert profile.gpu is not None
    assert "made up" in profile.gpu.name


def test_over_the_emulated_wire_of_an_h100_it_predicts_what_was_measured_there(profile: Profile) -> None:
    """The wire was a kernel that waits. Nothing of these steps is in the profile but computing alone."""
    assert MEASURED.exists()
    found = compared(profile, on_the_h100())
    assert [algorithm for algorithm, *_ in found] == ["dense", "topk", "powersgd", "efsign"]
    for algorithm, _, predicted, measured in found:
        assert predicted == pytest.approx(measured, rel=0.15), algorithm
    ranked = [sorted(found, key=lambda row: row[column]) for column in (2, 3)]
    assert ranked[0] == ranked[1]


def test_what_wins_depends_on_the_links() -> None:
    slow = seconds("8x8@1gbit")
    fast = seconds("8x8@400gbit", "--algorithms", "ddp,bf16,efsign,powersgd,localsgd")
    assert min(slow, key=slow.__getitem__) not in ("ddp", "bf16")
    assert slow["ddp"] > 3 * min(slow.values())
    assert fast["ddp"] < 1.05 * min(fast.values())
    assert {*slow} == {each.algorithm for each in Profile.load(SAVED).costs} - {
        "topk:ratio=0.01"
    }  # it is topk


def test_what_is_not_in_the_profile_has_to_be_measured_on_the_gpu() -> None:
    words = ("plan", "--profile", str(SAVED), "--cluster", "8x8@1gbit", "--algorithms")
    done = called(*words, "ddp,sign,lowbit,dgc:momentum=0.9")
    assert done.code == 0, done.err
    for each in ("sign", "lowbit", "dgc:momentum=0.9"):
        assert f"Left out: {each}: the profile lacks what {each!r} costs on 8x8" in done.out
    kept = "tacit profile --algorithms ddp,dense,"
    assert kept in done.out, "what the profile has is measured again, as the file has one run's costs alone"
    there = "powersgd,sign,lowbit,dgc:momentum=0.9 --cluster local:8 --layout 2x1,4x1,8x1,2x8,4x8,8x8 --out"
    assert there in done.out
    done = called("plan", "--profile", str(SAVED), "--cluster", "3x5@1gbit")
    assert done.code == 2
    assert "and so on, of " in done.err
    done = called(*words, "sign")
    assert done.code == 2
    assert "nothing can be predicted: sign: the profile lacks what" in done.err
    assert kept in done.err


def test_it_says_of_what_the_profile_is() -> None:
    done = called("plan", "--profile", str(SAVED), "--cluster", "8x8@1gbit", "--algorithms", "ddp")
    assert "as fast as on NVIDIA H100 80GB HBM3 (derived and made up: benchmarks/made_up_gpu.py)" in done.out
    assert "8x8@1gbit, GPU (NCCL), SGD: predicted" in done.out
    assert "tacit list" not in done.out, "ddp is exact"
    assert "straight line" not in done.out
    refused = called("plan", "--profile", str(SAVED), "--cluster", "8x8@1gbit", "--emulated")
    assert refused.code == 2
    assert "the profile is of a GPU" in refused.err


def test_it_says_what_the_profile_lacks_and_where_the_accuracy_of_the_fastest_stands() -> None:
    done = called("plan", "--profile", str(SAVED), "--cluster", "16x8@1gbit")
    assert done.code == 0, done.err
    assert "powersgd would be the fastest: " in done.out
    assert "times as fast as ddp. What it costs in accuracy: tacit list powersgd" in done.out
    assert "Planned by default, and not in this profile: dgc, lowbit, diloco:bits=4, " in done.out
    assert "on the straight line through 4x8 and 8x8" in done.out


def test_more_nodes_are_on_the_line_through_two_sizes() -> None:
    few, many = (seconds(f"{nodes}x8@10gbit", "--algorithms", "topk")["topk"] for nodes in (8, 32))
    assert many > few


def test_what_it_says_of_the_gpu(profile: Profile) -> None:
    text = _told(profile)
    assert "the host launches a step in" in text
    assert "NCCL's rings inside a node: 200.00 GB/s" in text
    assert "ms of the host to launch it" in text


def diagnosed(of: Profile, path: Path, cluster: str, *words: str) -> dict[str, float]:
    """What each cause costs, in shares of a step."""
    of.save(path)
    found = told("diagnose", "--profile", str(path), "--cluster", cluster, *words)
    return {each["kind"]: each["seconds"] / found["seconds"] for each in found["findings"]}


def test_a_saved_profile_is_diagnosed(profile: Profile, tmp_path: Path) -> None:
    path, gpu = tmp_path / "profile.json", profile.gpu
    assert isinstance(gpu, GpuProfile)
    limits = [
        told("diagnose", "--profile", str(SAVED), "--cluster", "4x8@10gbit", "--algorithm", each)["limit"]
        for each in ("ddp", "topk")
    ]
    assert limits[0] == limits[1], "what topk encodes on the GPU is no part of computing alone"
    healthy = diagnosed(profile, path, "8x8@10gbit")
    assert healthy["links"] > 0.5
    assert not {"PCIe", "TF32", "launches", "data loader"} & {*healthy}
    assert diagnosed(profile, path, "2x8@10gbit", "--algorithm", "bf16")["links"] > 0.5, "DDP is slower"
    starving = replace(profile, step=replace(profile.step, data=0.05, loading=0.05))
    assert diagnosed(starving, path, "8x8@400gbit")["data loader"] > 0.2
    by_pcie = replace(gpu, links=replace(gpu.links, near_rate=1e10), tf32_gain=0.4)
    ill = diagnosed(replace(profile, gpu=by_pcie), path, "1x8")
    assert ill["PCIe"] > 0.1
    assert 0.25 < ill["TF32"] < 0.4
    busy = replace(gpu, launching=replace(gpu.launching, backward=0.07))
    small = replace(profile, gpu=busy, bucket_bytes=1 << 20)
    tiny = diagnosed(small, path, "1x8", "--algorithm", "dense")
    assert tiny["small buckets"] > 0.05, "each takes half a millisecond of the host's time to launch"
    bound = replace(gpu, launching=replace(gpu.launching, forward=profile.step.forward))
    assert diagnosed(replace(profile, gpu=bound), path, "8x8@400gbit")["launches"] == 0.0


def test_a_diagnosis_is_of_a_script_or_of_a_profile() -> None:
    for words in ((), ("--profile", str(SAVED), "--", "train.py")):
        done = called("diagnose", *words)
        assert done.code == 2
        assert "by one of the two" in done.err
    done = called("diagnose", "--profile", str(SAVED))
    assert done.code == 2
    assert "say for which cluster, such as --cluster 8x8@10gbit: the profile has costs for 2x1" in done.err
    done = called("diagnose", "--profile", str(SAVED), "--cluster", "8x8@1gbit", "--algorithm", "sign")
    assert done.code == 2
    assert "lacks what 'sign' costs on 8x8" in done.err
    done = called("diagnose", "--profile", str(SAVED), "--cluster", "3x5@1gbit")
    assert "lacks what 'ddp' costs on 3x5, and has it for 2x1, 4x1, 8x1, 2x8, 4x8, 8x8" in done.err
    assert "what it has is for 1 or 8 ranks a node" in done.err
    assert "--layout 2x1,4x1,8x1,3x5,6x5,2x8,4x8,8x8" in done.err


@pytest.mark.parametrize("command", ["plan", "diagnose"])
def test_a_cluster_without_a_rate_is_said(command: str) -> None:
    words = () if command == "diagnose" else ("--algorithms", "ddp")
    said = "no rate is given, so links have no limit: write 8x8@10gbit"
    for cluster, there in (("8x8", True), ("8x8@10gbit", False), ("1x8", False)):
        done = called(command, "--profile", str(SAVED), "--cluster", cluster, *words)
        assert (said in done.out) == there, cluster
