"""How far replicas are from their mean, against numpy's."""

import numpy as np
import pytest
from replica_threads import Crew

from tacit.replicas.consensus import Consensus

APART = (
    "gossip:graph=ring",
    "sgp:late=1",
    "localsgd:sync_every=4",
    "easgd:sync_every=3",
    "diloco:sync_every=4",
)


def by_numpy(crew: Crew) -> tuple[float, float]:
    x = np.stack([replica.flat.double().numpy() for replica in crew.replicas])
    mean = x.mean(0)
    distance = np.linalg.norm(x - mean, axis=1).mean()
    return float(distance), float(distance / np.linalg.norm(mean))


def told(crew: Crew) -> list[Consensus | None]:
    return [replica.progress.consensus.last for replica in crew.replicas]


@pytest.mark.parametrize("peers", [4, 5])
@pytest.mark.parametrize("text", APART)
def test_it_is_numpys_and_measuring_changes_nothing(text: str, peers: int) -> None:
    crew = Crew(text, peers=peers)
    crew.train(6)  # between two rounds of those that have a period
    want, before = by_numpy(crew), [replica.flat for replica in crew.replicas]
    sent = [replica.session.stats.totals.bytes_out for replica in crew.replicas]
    crew.each(lambda _, replica: replica.progress.measure_consensus())
    for found in told(crew):
        assert found is not None
        assert (found.distance, found.relative) == pytest.approx(want, rel=1e-5)
        assert found.step == 6
    assert all(a.equal(replica.flat) for a, replica in zip(before, crew.replicas, strict=True))
    assert sent == [replica.session.stats.totals.bytes_out for replica in crew.replicas]
    assert len(set(told(crew))) == 1
    crew.close()


@pytest.mark.parametrize("text", ["gossip:graph=ring", "localsgd:sync_every=4", "easgd:sync_every=3"])
def test_sync_measures_it_just_before_it_makes_them_equal(text: str) -> None:
    crew = Crew(text, peers=4)
    crew.train(6)
    want = by_numpy(crew)
    crew.sync()
    for found in told(crew):
        assert found is not None
        assert (found.distance, found.relative) == pytest.approx(want, rel=1e-5)
    assert by_numpy(crew)[0] == 0
    crew.close()


def test_replicas_that_have_just_met_are_not_averaged_for_it() -> None:
    crew = Crew("localsgd:sync_every=3")
    crew.train(6)
    crew.each(lambda _, replica: replica.progress.measure_consensus())
    assert told(crew) == [Consensus(6, 0.0, 0.0)] * 3
    crew.close()


def test_of_one_replica_nothing_is_said() -> None:
    crew = Crew("localsgd:sync_every=4", peers=1)
    crew.train(2)
    crew.each(lambda _, replica: replica.progress.measure_consensus())
    crew.sync()
    assert told(crew) == [None]
    crew.close()
