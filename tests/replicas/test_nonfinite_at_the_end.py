"""A replica that has NaN where all are averaged, as a session closes: all are told, and none takes it."""

import pytest
import torch
from replica_threads import Crew

from in_threads import in_threads
from tacit.errors import NonFinite


@pytest.mark.parametrize("algorithm", ["localsgd:sync_every=4", "diloco:sync_every=4"])
def test_a_replica_that_has_nan_behind_the_last_round_is_named_and_not_averaged(algorithm: str) -> None:
    crew = Crew(algorithm, 3)
    crew.train(6)
    crew.replicas[1].named["b"][0] = torch.nan
    before = [replica.flat for replica in crew.replicas]

    def synced(rank: int) -> str:
        with pytest.raises(NonFinite) as error:
            crew.replicas[rank].progress.sync()
        return str(error.value)

    (said,) = {*in_threads(3, synced)}
    assert said.startswith("NaN or infinity in the parameter b on rank 1, in step 6: no rank has applied")
    for replica, was in zip(crew.replicas, before, strict=True):
        assert torch.equal(replica.flat.nan_to_num(), was.nan_to_num())
    crew.close()
