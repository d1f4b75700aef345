"""`tacit plan` and `tacit profile`: predictions, their page, and what cannot be planned."""

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import made_training as made
import pytest
import torch

from in_process_command import called
from tacit.optimizer_hooks.optimizer_facts import facts_of
from tacit.planning.profile import Profile
from tacit.planning.step_profiler import processor
from tacit_lab.cli import plan
from tacit_lab.cli.profile import _told

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "01_ddp_topk.py")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Of this machine, without costs: they are measured when they are asked for."""
    path = tmp_path / "profile.json"
    replace(made.profile(), processor=processor()).save(path)
    return str(path)


def planned(*words: str) -> dict[str, Any]:
    done = called("plan", *words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_profile_of_this_machine_is_planned_with_costs_measured_here(profile: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ("--cluster", "4x1@1mbit", "--algorithms", "ddp,topk,ps,diloco", "--page", str(page))
    found = planned("--profile", profile, *words)
    seconds = {each["algorithm"]: each["seconds"] for each in found["predictions"]}
    assert [*seconds] == sorted(seconds, key=lambda name: seconds[name])
    assert seconds["ddp"] > 5 * seconds["diloco"]
    assert [*found["refused"]] == ["ps"]
    ddp = next(each for each in found["predictions"] if each["algorithm"] == "ddp")
    assert ddp["bytes_out_of_a_node"] == pytest.approx(1.5 * made.profile().model_bytes, rel=0.01)
    html = page.read_text()
    assert "diloco would be the fastest" in html or "topk would be the fastest" in html
    assert html.count("<svg") == 6
    assert "between nodes" in html
    assert f"tacit plan --profile {profile} --cluster 4x1@1mbit" in html
    assert found["computes_on"] == "CPU (Gloo)"


def test_a_profile_of_this_machine_is_diagnosed_with_costs_measured_here(profile: str) -> None:
    done = called("diagnose", "--profile", profile, "--cluster", "2x1@1mbit")
    assert done.code == 0, done.err
    assert "ddp on 2 ranks: a step takes" in done.out
    assert "1. links, about" in done.out


def test_the_table_says_what_it_assumes_and_where_which_one_wins(profile: str) -> None:
    words = ("--cluster", "4x2@1gbit", "--algorithms", "ddp,topk", "--cores", "16", "--churn", "1h")
    done = called("plan", "--profile", profile, *words, "--sweep", "bandwidth=1mbit,100gbit")
    assert done.code == 0, done.err
    assert "4 members, each fails every 3600 s and is given up after 5 s" in done.out
    assert "2 ranks share 16 cores" in done.out
    assert "1 Mbit/s" in done.out
    assert "100 Gbit/s" in done.out
    rows = [line.split() for line in done.out.splitlines() if line.split()[:1] in (["2"], ["4"])]
    assert [row[1] for row in rows if row[1] in ("ddp", "topk")] == ["topk", "topk"]


def test_waiting_for_data_has_a_column_and_the_columns_are_explained(profile: str) -> None:
    replace(made.profile(loading=0.5), processor=processor()).save(Path(profile))
    done = called("plan", "--profile", profile, "--cluster", "2x1@1mbit", "--algorithms", "ddp")
    head, row = (line.split() for line in done.out.splitlines() if line.startswith(("algorithm", "ddp")))
    assert row[head[1:].index("loads")] == "500.0"  # `step ms` is two words
    step, *parts = map(float, row[1:7])
    assert sum(parts) == pytest.approx(step, abs=0.3)
    assert "waits for its data (loads)" in done.out
    assert not done.err


def test_it_says_what_it_does_at_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for at_terminal in (True, False):
        stream = StringIO()
        monkeypatch.setattr(stream, "isatty", lambda at_terminal=at_terminal: at_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        plan._say("Predicting")
        assert stream.getvalue() == ("Predicting\n" if at_terminal else "")


def test_a_plan_says_what_it_knows_of_links_that_are_not_perfect(profile: str) -> None:
    for link, lossy, others in (("1%loss", True, False), ("9ms±1ms", False, True), ("1ms", False, False)):
        done = called("plan", "--profile", profile, "--cluster", f"2x1@1mbit,{link}", "--algorithms", "ddp")
        assert done.code == 0, done.err
        assert ("what one connection of TCP Reno does" in done.err) == lossy
        assert ("without the links' jitter, MTU and NAT" in done.err) == others


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "a recipe, such as tacit plan digits"),
        (("digits", "--profile", "p.json"), "both a recipe, 'digits', and --profile p.json were given"),
        (("--profile", "/nowhere/p.json"), "tacit profile --out"),
        (("nothing",), "nothing"),
        (("digits", "--cluster", "0x1"), "0 nodes"),
        (("digits", "--churn", "1"), "--churn '1' must be a time above 0 with its unit"),
        (("digits", "--replicas", "9"), "--replicas 9 is for --churn: write --churn 1h"),
        (("digits", "--churn", "1h", "--replicas", "0"), "--replicas 0 must be more than 0"),
        (("digits", "--sweep", "nodes=3"), "--sweep bandwidth=10mbit,1gbit"),
        (("digits", "--page", "/nowhere/p.html"), "--page /nowhere/p.html"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    done = called("plan", *words)
    assert done.code == 2, done.out
    assert said in done.err


def test_links_of_another_cluster_are_refused(profile: str, tmp_path: Path) -> None:
    one = ((None, 1e8), (1e8, None))
    links = {
        **dict.fromkeys(("latency", "rate", "rate_of_flows", "rate_both_ways"), one),
        "form": 1,
        "hosts": ["a", "b"],
        "ranks": [[0], [1]],
        "flows": 4,
        "backend": "gloo",
        "date": "",
    }
    path = tmp_path / "links.json"
    path.write_text(json.dumps(links))
    words = ("--profile", profile, "--algorithms", "ddp", "--links", str(path))
    done = called("plan", "--cluster", "4x1@1gbit", *words)
    assert done.code == 2
    assert "measured on 2 nodes of 1 rank" in done.err
    slow = planned("--cluster", "2x1@1gbit", *words)["predictions"][0]["seconds"]
    fast = planned("--cluster", "2x1@1gbit", *words[:4])["predictions"][0]["seconds"]
    assert slow > fast, "the measured links are slower than the described ones"


def test_costs_of_another_machine_are_not_measured_here(profile: str) -> None:
    path = Path(profile)
    replace(Profile.load(path), processor="another").save(path)
    done = called("plan", "--profile", profile, "--algorithms", "topk", "--cluster", "4x1@1gbit")
    assert done.code == 2
    assert "tacit profile --algorithms topk --cluster local:" in done.err
    assert "--layout 2x1,4x1" in done.err


def test_what_a_small_model_does_not_fit_is_left_out_by_its_name(profile: str) -> None:
    whole = Profile.load(Path(profile))
    parameters = whole.step.parameters[:2]
    replace(whole, step=replace(whole.step, parameters=parameters)).save(Path(profile))
    words = ("plan", "--profile", profile, "--cluster", "2x1@1mbit", "--algorithms")
    why = "a model of 2 parameters cannot be cut into 4 fragments: write fewer, such as fragments=2"
    done = called(*words, "ddp,streaming-diloco")
    assert done.code == 0, done.err
    assert f"Left out: streaming-diloco: {why}" in done.out
    done = called(*words, "streaming-diloco")
    assert done.code == 2
    assert f"streaming-diloco: {why}" in done.err


def test_a_profile_of_a_sharded_model_is_refused_and_says_what_to_do(profile: str) -> None:
    shared = replace(Profile.load(Path(profile)), shards=2)
    shared.save(Path(profile))
    for command in ("plan", "diagnose"):
        done = called(command, "--profile", profile, "--cluster", "2x2@1gbit")
        assert done.code == 2, done.out
        said = " ".join(done.err.split())
        assert "a model that FSDP2 shards: 2 ranks share a replica" in said
        assert "attach 'auto' or call session.diagnose()" in said
    assert "2 ranks share a replica (FSDP2)" in _told(shared)
    assert "share a replica" not in _told(made.profile())


def test_a_script_is_profiled_and_ends_and_a_recipe_too(tmp_path: Path) -> None:
    saved = tmp_path / "profile.json"
    words = ("--algorithms", "topk", "--layout", "4x1", "--out", str(saved))
    done = called("profile", *words, "--", EXAMPLE)
    assert done.code == 0, done.err
    profile = Profile.load(saved)
    assert {each.algorithm for each in profile.costs} == {"topk"}
    assert profile.ranks == 2
    assert profile.step.backward > 0
    assert profile.per_byte > 0
    found = planned("digits", "--cluster", "64x2@1gbit", "--algorithms", "ddp,topk")
    assert {each["algorithm"] for each in found["predictions"]} == {"ddp", "topk"}
    assert not found["refused"]


def test_a_script_that_attaches_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    done = called("profile", "--out", str(tmp_path / "p.json"), "--", str(script))
    assert done.code == 1
    assert "must attach tacit" in done.err
    assert called("profile").code == 2


def test_passes_before_the_last_are_not_called_the_loader() -> None:
    once = made.profile(loading=0.5)
    assert "waiting for the loader" in _told(once)
    told = _told(replace(once, step=replace(once.step, passes=4)))
    assert "passes before the last, and data" in told
    assert "loader" not in told


def test_a_plan_has_what_fits_the_optimizer(profile: str) -> None:
    of = Profile.load(Path(profile))
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in of.named.items()}
    adam = torch.optim.AdamW(parameters.values(), betas=(0.8, 0.99))
    replace(of, optimizers=facts_of([adam], parameters)).save(Path(profile))
    done = called("plan", "--profile", profile, "--cluster", "2x1@1mbit", "--json")
    assert done.err == ""
    found = json.loads(done.out)
    planned_ones = {each["algorithm"] for each in found["predictions"]}
    assert {"ddp", "lowbit", "onebit-adam:beta=0.8", "zeroone-adam"} <= planned_ones
    assert {"dgc", "topk", "efsign", "powersgd"} <= {*found["refused"]}
    done = called(
        "plan", "--profile", profile, "--cluster", "2x1@1mbit", "--algorithms", "topk,dgc", "--json"
    )
    found = json.loads(done.out)
    assert [each["algorithm"] for each in found["predictions"]] == ["topk"]
    assert "AdamW cannot be switched off" in found["refused"]["dgc"]


def test_a_plan_says_where_it_does_not_know_the_optimizer_and_plans_those_for_adam(profile: str) -> None:
    words = ("plan", "--profile", profile, "--cluster", "2x1@1mbit")
    assert "Not filtered by the optimizer" in called(*words).err
    done = called(*words, "--algorithms", "ddp,bf16,int8,lowbit,onebit-adam,zeroone-adam", "--json")
    assert "optimizer" not in done.err
    found = json.loads(done.out)
    assert not found["refused"]
    assert len(found["predictions"]) == 6
