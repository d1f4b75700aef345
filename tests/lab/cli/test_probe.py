"""`tacit probe`: links as they are shaped, saved and drawn."""

from pathlib import Path

import pytest
import torch

from in_process_command import called
from tacit import probe
from tacit.errors import ConfigError, ProbeError
from tacit.links import Links
from tacit.transports import probing
from tacit.transports.probing import _Link
from tacit_lab.testbed.network.links import burst


def test_links_are_measured_as_they_are_shaped(namespaces: None, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "links.json", tmp_path / "links.html"
    words = (
        "--cluster",
        "2x2@50mbit",
        "--seconds",
        "0.1",
        "--out",
        str(saved),
        "--page",
        str(drawn),
        "--json",
    )
    done = called("probe", *words)
    assert done.code == 0, done.err
    links = Links.from_json(done.out)
    assert links == Links.load(saved)
    assert links.hosts == ("node0", "node1")
    assert links.ranks == ((0, 1), (2, 3))
    for matrix in (links.rate, links.rate_of_flows, links.rate_both_ways):
        for i, row in enumerate(matrix):
            for j, rate in enumerate(row):
                assert rate is not None
                # What else runs can only make a link seem slower.
                assert 0 < rate < (1e12 if i == j else 55e6), (i, j)
    assert "One stream, Mbit/s" in drawn.read_text()


def test_a_late_link_is_measured_by_transfers_that_are_long_enough(namespaces: None) -> None:
    done = called("probe", "--cluster", "2x1@100mbit,30ms", "--json")
    assert done.code == 0, done.err
    links = Links.from_json(done.out)
    (latency, back), (rate, other) = links.between(links.latency), links.between(links.rate_of_flows)
    assert latency == back
    assert 28.5e-3 <= latency <= 57e-3
    assert 15e6 <= min(rate, other) <= max(rate, other) <= 100e6
    assert min(links.between(links.rate)) >= 15e6  # by transfers of a tenth of a second it seemed 3 to 8


def test_transfers_grow_to_six_round_trips() -> None:
    """A link of 100 Mbit/s, on which a transfer takes three round trips more than its bytes."""
    trip, sizes = 0.06, list[int]()

    class Late(_Link):
        def _timed(self, size: int, *_: object) -> float:
            sizes.append(size)
            return 3 * self.trip + 8 * size / 100e6

        def _agreed(self, size: int) -> int:
            return size

    rate = Late((), 1, 0.1, True, (0, 1), trip).rate(1, to_upper=True)
    assert 3 * trip + 8 * sizes[-1] / 100e6 >= 0.8 * 6 * trip
    assert sizes[-1] == sizes[-2], "the last size is measured once more"
    assert rate == pytest.approx(100e6 / (1 + 3 * trip * 100e6 / (8 * sizes[-1])))


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9])
@pytest.mark.parametrize(("held_up", "within"), [(0.0, 1e-6), (0.01, 0.12)])
def test_a_burst_is_not_taken_for_the_rate(
    monkeypatch: pytest.MonkeyPatch, rate: float, held_up: float, within: float
) -> None:
    """A link as the testbed shapes it, idle before each transfer; `held_up`: seconds, by other work."""
    trip, clock, begun, sent = 1e-3, [0.0], [0.0], [0]

    class Arriving:
        def __init__(self, data: torch.Tensor, tag: int) -> None:
            self.data, self.tag = data, tag

        def wait(self) -> None:
            if self.tag == probing._TAG_READY:
                begun[0], sent[0] = clock[0] + trip, 0
            elif self.tag in (probing._TAG_AHEAD, probing._TAG_DATA):
                sent[0] += len(self.data)
                clock[0] = max(clock[0], begun[0] + max(0.0, 8 * (sent[0] - burst(rate)) / rate))
                clock[0] += held_up * (self.tag == probing._TAG_AHEAD)

    class Lower(_Link):
        def _receive(self, data: torch.Tensor, tag: int, flow: int = 0) -> Arriving:  # type: ignore[override]
            return Arriving(data, tag)

        _send = _receive  # type: ignore[assignment]

    monkeypatch.setattr(probing, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Lower, "_agreed", lambda _, size: size)
    found = Lower((), 1, 0.1, True, (0, 1), trip).rate(1, to_upper=False)
    assert rate * (1 - 1e-6) <= found <= rate * (1 + within)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "4x1@fast"), "4x1@fast"),
        (("--seconds", "0"), "--seconds"),
        (("--out", "/nowhere/links.json"), "--out /nowhere/links.json"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    done = called("probe", *words)
    assert done.code == 2
    assert said in done.err


def test_without_a_launcher_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit_:
        probe.main([])
    assert exit_.value.code == 2
    assert "or tacit probe --cluster 4x1@100mbit" in capsys.readouterr().err


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    with pytest.raises(ConfigError, match=r"names 'eth9', and there is no such .* write one of .*\blo\b"):
        probe.main([])


class _Down:
    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 20000ms for recv operation to complete\nsecond line")


@pytest.mark.parametrize(
    ("nodes", "where"), [((1, 3), "between node 1 and node 3"), ((2, 2), "within node 2")]
)
def test_a_link_that_is_down_is_named(nodes: tuple[int, int], where: str) -> None:
    link = _Link((), 1, 0.2, True, nodes)
    with pytest.raises(ProbeError, match=f"nothing comes through {where}") as raised:
        link._wait(_Down())  # type: ignore[arg-type]
    assert "second line" not in str(raised.value)
