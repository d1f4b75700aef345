"""Records of trainings, predictors that are trained on them, and how these are judged."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tacit.errors import ConfigError
from tacit.prediction.extrapolation import Linear, Stale
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.networks.wnn import WNN
from tacit.prediction.predictor import Predictor, Seen, in_a_row
from tacit.prediction.sent_subsets import in_turn
from tacit_lab.predictor_training import gain_search, mp2, wnn
from tacit_lab.predictor_training.dataset import load, save
from tacit_lab.predictor_training.evaluation import judge
from tacit_lab.predictor_training.layers import Layer, Recorder
from tacit_lab.predictor_training.runs import Sampling, TrainingRun, plan, record
from tacit_lab.predictor_training.simulation import Round, Simulation, kinds
from tacit_lab.predictor_training.synthetic import MadeUp
from tacit_lab.predictor_training.trajectories import motions, reach, roll_out, when
from tacit_lab.predictor_training.trials import End, Trial, evaluate, in_the_loop, predicting
from tacit_lab.recipes.recipe import Recipe, seeded


def layer_of(changes: Tensor, kind: str = "linear", **other: object) -> Layer:
    rounds, elements = changes.shape
    told: dict[str, object] = {
        "run": "a",
        "split": "train",
        "name": "w",
        "kind": kind,
        "shape": (elements, 1),
        "depth": 0.0,
        "phase": 0,
        "steps": torch.arange(1, rounds + 1),
        "lr": torch.full((rounds,), 0.1),
        "changes": changes,
        "swings": changes.square().mean(1).sqrt(),
    }
    return Layer(**(told | other))  # type: ignore[arg-type]


def decaying(factor: float, kind: str = "linear", seed: int = 0, rounds: int = 24) -> Layer:
    """Every change is `factor` times the one before."""
    first = torch.randn(60, generator=torch.Generator().manual_seed(seed))
    return layer_of(torch.stack([first * factor**i for i in range(rounds)]), kind)


class Line(Recipe):
    """A tiny recipe: a line through points, by SGD with momentum."""

    name, epochs, target, batch = "line", 1, 0.0, 4

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1)), seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def steps_per_epoch(self, world: int) -> int:
        return 48 // world

    def train_batches(self, epoch: int, rank: int, world: int, seed: int):  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(1000 * epoch + 10 * rank + seed)
        for _ in range(self.steps_per_epoch(world)):
            x = torch.randn(self.batch, 3, generator=generator)
            yield x, x.sum(1, keepdim=True)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def evaluate(self, model: nn.Module, rank: int = 0, world: int = 1) -> tuple[float, float]:
        x = torch.eye(3)
        with torch.no_grad():
            return float(self.loss(model(x), x.sum(1, keepdim=True))), 0.5


# ---- simulated workers --------------------------------------------------------------------------------


def test_workers_that_push_everything_step_as_one_on_all_their_batches() -> None:
    """With SGD, momentum included."""
    line = Line()
    simulation = Simulation(line, "localsgd:sync_every=1", workers=3, steps=10, seed=1)
    rounds = list(simulation.rounds())
    model = line.model(1)
    sgd = line.optimizer(model)
    streams = [line.train_batches(0, rank, 3, 1) for rank in range(3)]
    for batches in [*zip(*streams, strict=True)][:10]:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        sgd.zero_grad()
        line.loss(model(x), y).backward()
        sgd.step()
    for mine, theirs in zip(simulation.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [each.number for each in rounds] == list(range(10))
    came = sum((each.answer["0.weight"] for each in rounds), torch.zeros(40, 3))
    torch.testing.assert_close(came, (model[0].weight - line.model(1)[0].weight).detach())  # type: ignore[index]
    torch.testing.assert_close(rounds[4].answer["0.weight"], rounds[4].progress["0.weight"])


def test_rounds_come_when_the_strategy_says() -> None:
    simulation = Simulation(Line(), "localsgd:sync_every=4", workers=2, steps=10)
    assert [each.step for each in simulation.rounds()] == [4, 8]


def test_what_is_not_sent_is_predicted_and_lost() -> None:
    strategy = predicting(Stale(), share=0.3, sync_every=1, steps=12)
    assert strategy.compressor.whole_below == 1024  # type: ignore[attr-defined]
    simulation = Simulation(MadeUp("lenet"), strategy, workers=2, steps=5)
    *_, last = simulation.rounds()
    sent = last.answer["7.weight"] != 0
    assert 0 < float(sent.float().mean()) < 0.3
    torch.testing.assert_close(last.answer["7.weight"][sent], last.progress["7.weight"][sent])
    torch.testing.assert_close(last.answer["7.bias"], last.progress["7.bias"])


@pytest.mark.parametrize("algorithm", ["topk", "ednncomm", "streaming-diloco"])
def test_other_strategies_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="does not average progress at once in one level"):
        Simulation(Line(), algorithm, steps=5)


def test_too_many_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="line has too little data for 100 workers"):
        Simulation(Line(), "localsgd", workers=100, steps=5)


# ---- records ------------------------------------------------------------------------------------------


def told(number: int, model: nn.Module) -> Round:
    progress = {name: torch.full_like(p, number + 1.0) for name, p in model.named_parameters()}
    return Round(number, number + 1, 0.1, progress, {name: x / 2 for name, x in progress.items()})


def test_a_record_holds_what_every_layer_did() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Embedding(6, 2), nn.Linear(16, 3))
    recorder = Recorder(model, elements=10, share=0.5)
    for number in range(4):
        recorder.note(number // 2, told(number, model))
    layers = recorder.layers()
    assert [(each.name, each.kind, each.shape) for each in layers[:5]] == [
        ("0.weight", "convolution", (4, 1, 3, 3)),
        ("0.bias", "vector", (4,)),
        ("2.weight", "linear", (6, 2)),
        ("3.weight", "linear", (3, 16)),
        ("3.bias", "vector", (3,)),
    ]
    last = layers[8]
    assert (last.name, last.phase, last.depth, last.steps.tolist()) == ("3.weight", 1, 0.6, [3, 4])
    assert last.changes.tolist() == [[3.0] * 10, [4.0] * 10]
    assert last.swings.tolist() == [3.0, 4.0]
    assert layers[4].changes.shape == (2, 3), "all of a small layer"


def test_each_phase_has_its_stretch() -> None:
    told = [Sampling(rounds=18, phases=3, length=100).phase_of(number) for number in range(100)]
    assert [told.count(i) for i in range(3)] == [6, 6, 6]
    assert (told[0], told[47], told[99]) == (0, 1, 2)
    assert None not in [Sampling(rounds=20, phases=2).phase_of(number) for number in range(20)]


def test_one_network_and_one_data_set_are_held_out_by_run() -> None:
    runs = plan(
        ["made-up", "digits"], ["lenet", "vit"], rates=[1, 0.1], hold_model="alexnet", hold_data="digits"
    )
    learnt = [run for run in runs if run.split == "train"]
    assert {(run.data, run.model, run.rate) for run in learnt} == {
        ("made-up", model, rate) for model in ("lenet", "vit") for rate in (1, 0.1)
    }
    assert [(r.data, r.model, r.split) for r in runs if r not in learnt] == [
        ("made-up", "alexnet", "architecture"),
        ("digits", "", "data"),
    ]


def test_a_training_is_recorded() -> None:
    said: list[str] = []
    layers = list(
        record([TrainingRun("made-up", "lenet")], Sampling(rounds=12, phases=2, elements=5), tell=said.append)
    )
    assert len(layers) == 20
    assert {layer.phase for layer in layers} == {0, 1}
    assert all(layer.changes.shape == (6, 5) for layer in layers)
    assert "20 layers" in said[0]
    assert set(kinds(MadeUp("lenet").model(0)).values()) == {"convolution", "linear", "vector"}


def test_a_training_that_leaves_the_finite_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate 1e\\+30, seed 0 did not stay finite: write lower --rates"):
        list(record([TrainingRun("made-up", "lenet", rate=1e30)], Sampling(rounds=12, phases=1)))


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    one = decaying(0.5)
    other = replace(one, split="data")
    save(tmp_path / "r.safetensors", [one, other])
    mine, theirs = load(tmp_path / "r.safetensors")
    assert (mine.run, mine.split, mine.shape, theirs.split) == ("a", "train", (60, 1), "data")
    for name in ("steps", "lr", "changes", "swings"):
        assert torch.equal(getattr(mine, name), getattr(one, name))


HEAD = {"format": "tacit-record", "version": "3"}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "holds no record"),
        ({**HEAD, "version": "7"}, "of version 7, and this tacit reads version 3"),
        (HEAD, "its header names no layers"),
        ({**HEAD, "layers": "[]"}, "its header names no layers"),
        ({**HEAD, "layers": '[{"run": "a"}]'}, "layer 0 should have run, split"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, metadata: dict[str, str], says: str) -> None:
    path = tmp_path / "r.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata)
    with pytest.raises(ConfigError, match=says):
        load(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("0.lr"), "tensors of layer 0 do not fit"),
        (lambda tensors: tensors.update({"0.swings": torch.ones(3)}), "tensors of layer 0 do not fit"),
        (lambda tensors: tensors["0.changes"].fill_(torch.nan), "finite"),
    ],
)
def test_damaged_layers_are_refused(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    from safetensors import safe_open

    path = tmp_path / "r.safetensors"
    save(path, [decaying(0.5)])
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)
    with pytest.raises(ConfigError, match=says):
        load(path)


def test_a_record_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    save(path, [decaying(0.5)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read as a record"):
        load(path)
    with pytest.raises(ConfigError, match="there is no record of trainings"):
        load(tmp_path / "absent")


# ---- what is known of the past ------------------------------------------------------------------------


def test_windows_hold_what_was_heard_of_and_when() -> None:
    """Of each element change t is 10 t, and its own number: so that it says of itself which it is."""
    changes = 10.0 * torch.arange(20.0).unsqueeze(1) + torch.arange(3.0)
    (motion,) = motions([layer_of(changes, swings=2.0 ** torch.arange(20))])
    for share, pairs in ((1.0, {(2, 1)}), (0.5, {(3, 1)}), (0.4, {(3, 1), (4, 1), (5, 2)})):
        for w in (
            motion.windows(share),
            motion.draw(share, 200, torch.Generator().manual_seed(0)),
        ):
            rounds = w.true // 10
            assert set(rounds.tolist()) == set(range(reach(share), 20))
            assert {(int(a), int(b)) for a, b in w.seen.ages.t()} == pairs
            torch.testing.assert_close(w.seen.changes, w.true - 10 * w.seen.ages)
            torch.testing.assert_close(w.seen.swings, 2.0**w.seen.ages)
    assert motion.windows(0.5).true.numel() == 3 * (20 - 4)


@pytest.mark.parametrize("share", [0.11, 0.3, 0.35, 0.4, 0.5, 0.7])
def test_what_is_heard_of_is_as_old_as_where_entries_take_turns(share: float) -> None:
    total, last, gap = 3000, torch.zeros(3000), torch.zeros(3000)
    found: Counter[tuple[int, int]] = Counter()
    for number in range(120):
        sent = in_turn(total, round(share * total), number, seed=1)
        rest = torch.ones(total, dtype=torch.bool).index_fill(0, sent, False)
        if number > 40:
            age = number - last[rest]
            found.update(zip((age + gap[rest]).int().tolist(), age.int().tolist(), strict=True))
        gap[sent] = number - last[sent]
        last[sent] = number
    drawn = when(share, 200_000, torch.Generator().manual_seed(0)).t().tolist()
    made = Counter((older, age) for older, age in drawn)
    assert max(older for older, _ in made) < reach(share)
    for pair in found.keys() | made.keys():
        assert made[pair] / made.total() == pytest.approx(found[pair] / found.total(), abs=0.01)


def test_layers_are_drawn_from_alike_however_large() -> None:
    """And those of another kind, too short or at rest are not."""
    large, small = torch.ones(9, 1000), torch.full((9, 1), 2.0)
    layers = [
        layer_of(large),
        layer_of(small),
        layer_of(small * 0),
        layer_of(small[:4]),
        decaying(0.5, "vector"),
    ]
    (motion,) = motions(layers, "linear", share=0.5)
    true = motion.draw(0.5, 4000, torch.Generator().manual_seed(0)).true
    assert float((true == 2).float().mean()) == pytest.approx(0.5, abs=0.05)


def test_along_a_motion_what_is_not_sent_is_told_from_what_was() -> None:
    """Each element is true in one round of the period, and else a function of when it last was."""
    torch.manual_seed(0)
    (motion,) = motions([layer_of(torch.randn(30, 90))])
    answers = roll_out(lambda seen: seen.changes[-1] * 100 + seen.ages[-1], motion, period=5, seed=3)
    assert torch.equal(answers[:10], motion.changes[:10])
    true = answers == motion.changes
    for element, column in enumerate(true.t()):
        places = column[10:].nonzero().flatten()
        assert places.diff().tolist() == [5] * (len(places) - 1)
        turn = int(places[0]) % 5
        for t in range(10, 30):
            age = (t - turn) % 5
            if age:
                expected = motion.changes[t - age, element] * 100 + age
                assert float(answers[t, element]) == pytest.approx(float(expected), rel=1e-5)


def test_everything_sent_leaves_nothing_to_predict() -> None:
    (motion,) = motions([decaying(0.5)])
    assert torch.equal(roll_out(lambda seen: seen.changes[0] * 0, motion, period=1), motion.changes)


# ---- training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "share"), [("l1", 1.0), ("mse", 0.5), ("l1", 0.4)])
def test_a_trained_network_foretells_what_it_has_learnt(tmp_path: Path, loss: str, share: float) -> None:
    """A decay that no other predictor is told of; other elements than those it learnt from."""
    seen = [decaying(0.7), decaying(0.7, "convolution")]
    weights = mp2.train(seen, steps=300, batch=512, loss=loss, share=share)
    assert set(weights) == {"linear", "convolution"}
    weight_files.write(tmp_path / "w.pt", "mp2", weights)
    others = [decaying(0.7, seed=1)]
    predictors: dict[str, Predictor] = {
        "still": Stale(),
        "line": Linear(),
        "mp2": MP2(str(tmp_path / "w.pt")),
    }
    scores = {s.predictor: s for s in evaluate(predictors, others, share)}
    assert scores["still"].absolute == scores["still"].squared == pytest.approx(1.0)
    assert scores["mp2"].absolute < 0.2 < scores["line"].absolute


def test_a_network_learns_from_what_is_known_at_its_share() -> None:
    torch.manual_seed(1)
    layers = [layer_of(torch.randn(40, 50).cumsum(0) * 0.1)]
    made = [
        mp2.train(layers, share=share, steps=20, batch=64, width=2)["linear"] for share in (0.2, 0.5, 0.5)
    ]
    assert not torch.equal(made[0]["last.weight"], made[1]["last.weight"])
    assert torch.equal(made[1]["last.weight"], made[2]["last.weight"])


def test_what_travels_whole_learns_from_the_last_two_rounds() -> None:
    """Vectors: they are not predicted in part, so that the share is nothing to them."""
    layers = [decaying(0.7, "vector"), decaying(0.6, "vector")]
    made = [mp2.train(layers, share=share, steps=20, batch=64)["vector"] for share in (0.2, 0.5)]
    assert torch.equal(made[0]["last.weight"], made[1]["last.weight"])


def test_what_never_moves_teaches_nothing() -> None:
    still = layer_of(torch.zeros(12, 5))
    with pytest.raises(ConfigError, match="no recorded layer moves for long enough"):
        mp2.train([still], steps=1)
    assert evaluate({"still": Stale()}, [still]) == []


def test_wnn_learns_where_lines_lead(tmp_path: Path) -> None:
    """Straight lines go on straight: five periods after the last of five values lie 5/4 of their range."""
    slopes = torch.randn(1, 80, generator=torch.Generator().manual_seed(0)).expand(40, 80)
    weights = wnn.train([layer_of(slopes)], period=2, steps=250, batch=256, lr=3e-3)
    weight_files.write(tmp_path / "w.pt", "wnn", weights)
    line = WNN(str(tmp_path / "w.pt")).change(in_a_row(torch.full((4, 1), 0.3)), "linear")
    assert float(line) == pytest.approx(0.3, rel=0.2)


def test_the_gain_is_that_with_which_trainings_end_best(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    def ends(trial: Trial, predictor: MP2, gain: float) -> End | None:
        assert predictor.kinds() == ("linear",)
        seen.append((trial.recipe.name, gain))
        return None if gain == 1 else End((gain - 0.5) ** 2, 0.9)

    monkeypatch.setattr(gain_search, "in_the_loop", ends)
    weights = mp2.train([decaying(0.7)], steps=2, batch=16)
    trials = [Trial(Line(), 1), Trial(MadeUp("lenet"), 1)]
    chosen = gain_search.best(weights, [1.0, 0.5, 0.25], trials)
    assert len(seen) == 6
    for name, w in chosen["linear"].items():
        assert torch.equal(w, weights["linear"][name] * (0.5 if name.startswith("last.") else 1))
    with pytest.raises(ConfigError, match="no training stays finite with any gain of 1"):
        gain_search.best(weights, [1.0, 1.0], trials)
    seen.clear()
    assert torch.equal(
        gain_search.best(weights, [0.25], trials)["linear"]["last.bias"], weights["linear"]["last.bias"] / 4
    )
    assert not seen, "there is nothing to choose"


def test_predictions_are_scaled_in_the_loop() -> None:
    """By a gain in the file as by one in the strategy."""
    torch.manual_seed(0)
    weights = mp2.train([decaying(0.7), decaying(0.7, "convolution")], steps=40, batch=64)
    trial = Trial(MadeUp("lenet"), 1, workers=16, share=0.3, sync_every=1)
    with TemporaryDirectory() as folder:
        for name, each in (("all", weights), ("half", gain_search.scaled(weights, 0.5))):
            weight_files.write(f"{folder}/{name}.pt", "mp2", each)
        one = in_the_loop(trial, MP2(f"{folder}/half.pt"))
        other = in_the_loop(trial, MP2(f"{folder}/all.pt"), 0.5)
    assert one is not None
    assert other is not None
    assert one.loss == pytest.approx(other.loss, rel=1e-3)


# ---- judging ------------------------------------------------------------------------------------------


def test_a_training_in_the_loop_of_everything_is_a_full_push() -> None:
    trial = Trial(Line(), 2, workers=2, share=1.0, sync_every=1)
    told = judge(trial, {"stale": Stale(), "line": Linear()}, moments=2, held_out=[decaying(0.5)])
    assert [row.loss for row in told.rows] == [pytest.approx(told.loss, rel=1e-3)] * 2
    assert [row.within for row in told.rows] == [True, True]
    assert told.rows[0].assembled == pytest.approx(told.next_loss)
    assert told.rows[0].errors["linear"] == pytest.approx(1.0)
    assert told.rows[0].held_out == {"train, linear": pytest.approx(1.0)}
    assert [row.operations for row in told.rows] == [0, 2]
    assert all((row.microseconds or 0) > 0 for row in told.rows)
    assert len(told.paths) == 2, "one layer of two dimensions"
    assert list(told.paths[0].led["stale"]) == list(told.paths[0].true)


def test_what_predicts_nonsense_is_not_within() -> None:
    class Wild(Linear):
        def change(self, seen: Seen, kind: str) -> Tensor:
            return seen.changes[-1] * -3

    trial = Trial(MadeUp("lenet"), 1, workers=8)
    wild, still = in_the_loop(trial, Wild()), in_the_loop(trial, Stale())
    assert still is not None
    assert wild is None or wild.loss > still.loss
