"""PowerSGD where DDP has four buckets: ours, and torch's own hook. Does it get through?

Torch's hook waits for its second collective inside the callback of the first. With several buckets on Gloo
these callbacks hold the threads that the collectives they wait for would need, and ranks can come to wait for
each other, or to take each other's messages. Reported as it comes: finished, hung, or aborted with a message.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

NAME = "four-buckets"
CLUSTER = "4x1@100mbit"
ARMS = ("powersgd:rank=2", "torch:powersgd")
STEPS = 6
LIMIT = 45.0
"""Seconds until the run is stopped and all its processes are killed; to finish takes about 25."""
BUCKET_MB = 9.0
"""Cuts VGG-11 into four buckets."""
MARK = "BUCKETS "


@dataclass
class Outcome:
    """What came of an arm.

    Attributes:
        buckets: as DDP made them; None where no step told.
        steps: finished, of `STEPS`.
        outcome: "finished", "hung" (the time limit ended it) or "aborted".
        message: the first line that said why.
    """

    arm: str
    buckets: int | None = None
    steps: int = 0
    outcome: str = "finished"
    message: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """A line for people."""
        told = f": {self.message}" if self.message else ""
        return (
            f"{NAME}, {CLUSTER}: {self.arm} {self.outcome} after {self.steps} of {STEPS} steps "
            f"(buckets: {self.buckets or 'not told'}; {self.seconds:.0f} s){told}"
        )


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(arm: str) -> None:
    """Take a few steps; rank 0 says how far it has come."""
    from torch.nn.parallel import DistributedDataParallel

    from arms import Trainer, ranks

    with ranks() as rank:
        trainer = Trainer(arm, mixed=True, bucket_cap_mb=BUCKET_MB)
        for step in range(STEPS):
            trainer.step()
            if rank == 0:
                # What DDP logs of its second layout, the one that stays.
                assert isinstance(trainer.model, DistributedDataParallel)
                sizes = trainer.model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
                found = {"steps": step + 1, "buckets": len(str(sizes).split(",")) if sizes else None}
                print(MARK + json.dumps(found), flush=True)
        trainer.close()


# ---- outside ------------------------------------------------------------------------------------------


def measure() -> list[Outcome]:
    """Both arms, one after the other, each in a testbed of its own that is gone behind it."""
    return [_measure(arm) for arm in ARMS]


def _measure(arm: str) -> Outcome:
    from tacit_lab.cluster import Cluster
    from tacit_lab.testbed import Testbed

    found = Outcome(arm)

    def listen(node: int, line: str) -> None:
        if line.startswith(MARK):
            for name, value in json.loads(line.removeprefix(MARK)).items():
                setattr(found, name, value)
        elif not found.message and _says_why(line):
            found.message = f"node {node}: {line.strip()}"

    with Testbed(Cluster.parse(CLUSTER)) as bed:
        result = bed.run([__file__, arm], on_line=listen, timeout=LIMIT)
    found.seconds = result.seconds
    if result.timed_out:
        found.outcome = "hung"
    elif not result.ok:
        found.outcome = "aborted"
        found.message = "; ".join(filter(None, [str(result.failures[0]), found.message]))
    return found


def _says_why(line: str) -> bool:
    return any(word in line for word in ("what():", "Error:", "enforce fail"))


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
    else:
        print(json.dumps([asdict(each) for each in measure()], indent=1))
