"""WNN against its lines in numpy, and, where the authors' weights are at hand, against their numbers."""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from tacit.prediction.networks import weight_files
from tacit.prediction.networks.wnn import WNN, WNNNetwork, forecast, networks
from tacit.prediction.predictor import in_a_row

GOLDEN = os.environ.get("TACIT_WNN", "")
RAMP = [0.0, 1.0, 2.0, 3.0, 4.0]


def made(seed: int) -> WNNNetwork:
    torch.manual_seed(seed)
    network = WNNNetwork()
    torch.nn.init.normal_(network.last.weight, std=0.3)
    return network


def by_hand(w: np.ndarray, p: dict[str, np.ndarray]) -> float:
    """One element's forecast, line by line."""

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return p[f"{name}.weight"] @ x + p[f"{name}.bias"]

    def stream(name: str, x: np.ndarray) -> np.ndarray:
        h = dense(f"{name}.wide", x)
        z = np.maximum(dense(f"{name}.z", h), 0)
        h = dense(f"{name}.a", z) + dense(f"{name}.b", z) * np.exp(dense(f"{name}.c", z) * h)
        h = dense(f"{name}.narrow", h)
        return np.where(h > 0, h, 0.3 * h)

    r = w.max() - w.min() + 1e-8
    x = (w - w[0]) / (r + 1e-5) / 2
    both = np.concatenate((stream("values", x), stream("steps", np.diff(x))))
    return float((x[-1] + np.tanh(dense("last", both))[0]) * (r + 1e-5) * 2 + w[0])


def test_it_is_the_papers_network() -> None:
    network = made(0)
    assert sum(p.numel() for p in network.parameters()) == 9425
    weights = {name: p.detach().double().numpy() for name, p in network.named_parameters()}
    values = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    expected = [by_hand(values[:, i].double().numpy(), weights) for i in range(40)]
    torch.testing.assert_close(forecast(values, network), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_what_does_not_move_stays_for_every_kind() -> None:
    """Also a bias: its last value is normalised before delta is added."""
    still = forecast(torch.full((5, 3), 7.0), made(2))
    torch.testing.assert_close(still, torch.full((3,), 7.0), rtol=0, atol=1e-4)


def test_the_untrained_forecasts_the_last_value() -> None:
    values = torch.randn(5, 20, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(forecast(values, WNNNetwork()), values[-1], rtol=1e-5, atol=1e-5)


def test_a_round_goes_a_fifth_of_the_way(tmp_path: object) -> None:
    network = made(4)
    file = f"{tmp_path}/wnn.pt"
    weight_files.write(file, "wnn", {"linear": {k: p.detach() for k, p in network.named_parameters()}})
    past: Tensor = torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    values = torch.cat((torch.zeros(1, 9), past.cumsum(0)))
    expected = (forecast(values, network) - values[-1]) / 5
    assert torch.equal(WNN(file).change(in_a_row(past), "linear"), expected)
    assert not bool(WNN(file).change(in_a_row(past), "convolution").any())


def test_of_two_changes_four_are_made_that_lead_from_one_to_the_other(tmp_path: object) -> None:
    file = f"{tmp_path}/wnn.pt"
    weight_files.write(file, "wnn", {"linear": {k: p.detach() for k, p in made(4).named_parameters()}})
    two = torch.randn(2, 9, generator=torch.Generator().manual_seed(5))
    two[:, 3] = 0.0
    four = torch.stack([two[0] + (two[1] - two[0]) * i / 3 for i in range(4)])
    change = WNN(file).change(in_a_row(two), "linear")
    torch.testing.assert_close(change, WNN(file).change(in_a_row(four), "linear"), rtol=1e-4, atol=1e-6)
    assert float(change[3]) == 0.0, "it never moved"


@pytest.mark.skipif(not GOLDEN, reason="TACIT_WNN names no file of the authors' weights")
@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (RAMP, "convolution", 8.2133),
        (RAMP, "linear", 8.6148),
        (RAMP, "vector", 7.5843),
        ([k**0.5 for k in range(5)], "convolution", 2.5333),
        ([0.0, 1.0, 0.0, 1.0, 0.0], "convolution", -2.0),
        ([3.0] * 5, "vector", 3.0),
    ],
)
def test_the_authors_numbers(values: list[float], kind: str, expected: float) -> None:
    got = forecast(torch.tensor(values).unsqueeze(1), networks(GOLDEN)[kind])
    assert float(got) == pytest.approx(expected, abs=1e-4)
