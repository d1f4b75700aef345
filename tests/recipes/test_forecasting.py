"""Records of trainings, and predictors that are trained on them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tacit.errors import ConfigError
from tacit.predictors import MP2, Linear, Stale, files
from tacit.recipes.forecasting import evaluate, table, train, windows
from tacit.recipes.record import Layer, load, record, save


def decaying(run: str, factor: float, kind: str = "linear", seed: int = 0) -> Layer:
    """Every change is `factor` times the one before."""
    first = torch.randn(60, generator=torch.Generator().manual_seed(seed))
    changes = torch.stack([first * factor**i for i in range(12)])
    return Layer(run, "w", kind, (60, 1), 0.0, changes, changes.mean(1), torch.ones(12))


def trained_model() -> tuple[nn.Module, list[Layer]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    data = [(torch.randn(8, 1, 4, 4), torch.randint(3, (8,))) for _ in range(7)]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, record("one", model, sgd, data, loss=nn.CrossEntropyLoss(), elements=30, share=0.5)


def test_a_record_holds_what_every_layer_did() -> None:
    torch.manual_seed(0)
    before = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    model, layers = trained_model()
    assert [(each.name, each.kind) for each in layers] == [
        ("0.weight", "convolution"),
        ("0.bias", "vector"),
        ("2.weight", "linear"),
        ("2.bias", "vector"),
    ]
    assert layers[2].changes.shape == (7, 30)
    assert layers[2].trends.shape == layers[2].lr.shape == (7,)
    # All of a bias is recorded, in some order: its changes add up to how far it has come.
    come = (model[2].bias - before[2].bias).detach()  # type: ignore[index]
    torch.testing.assert_close(layers[3].changes.sum(0).sort().values, come.sort().values)


def test_windows_are_consecutive() -> None:
    changes = torch.arange(12.0).view(6, 2)
    layer = Layer("r", "w", "linear", (2, 1), 0.0, changes, torch.arange(6.0), torch.ones(6))
    w = windows(layer)
    assert w.past.t().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [2, 4, 6, 8], [3, 5, 7, 9]]
    assert w.true.tolist() == [8, 9, 10, 11]
    assert w.trend.tolist() == [4, 4, 5, 5]
    assert windows(layer, first=1).true.tolist() == [10, 11]


@pytest.mark.parametrize("loss", ["l1", "mse"])
def test_a_trained_network_foretells_what_it_has_learnt(tmp_path: Path, loss: str) -> None:
    """A decay that no other predictor is told of; other elements than those it learnt from."""
    weights = train([decaying("a", 0.7), decaying("a", 0.7, "convolution")], steps=300, batch=512, loss=loss)
    assert set(weights) == {"linear", "convolution"}
    files.write(tmp_path / "w.pt", "mp2", weights)
    others = [decaying("b", 0.7, seed=1)]
    scores = {
        s.predictor: s
        for s in evaluate({"still": Stale(), "line": Linear(), "mp2": MP2(str(tmp_path / "w.pt"))}, others)
    }
    assert scores["still"].absolute == scores["still"].squared == pytest.approx(1.0)
    assert scores["mp2"].absolute < 0.1 < scores["line"].absolute
    assert "| mp2 | linear | 0.0" in table(list(scores.values()))


def test_what_never_moves_teaches_nothing() -> None:
    still = decaying("a", 0.0)
    moved = Layer("a", "v", "vector", (60,), 0.0, still.changes * 0, still.trends * 0, still.lr)
    assert train([moved], steps=1) == {}
    assert evaluate({"still": Stale()}, [moved]) == []


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="loss"):
        train([decaying("a", 0.5)], loss="hinge")


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    _, layers = trained_model()
    save(tmp_path / "r.pt", layers)
    for mine, theirs in zip(layers, load(tmp_path / "r.pt"), strict=True):
        assert (mine.run, mine.name, mine.kind, mine.shape) == (
            theirs.run,
            theirs.name,
            theirs.kind,
            theirs.shape,
        )
        assert torch.equal(mine.changes, theirs.changes)


def broken(tmp_path: Path, content: object) -> Path:
    torch.save(content, tmp_path / "r.pt")
    return tmp_path / "r.pt"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (Tensor([1.0]), "holds no record"),
        ({"format": "tacit-record", "version": 7}, "version 7"),
        ({"format": "tacit-record", "version": 1, "layers": [{"run": "a"}]}, "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(broken(tmp_path, content))
    (tmp_path / "r.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "r.pt")
