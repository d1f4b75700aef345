"""Records of a comparison that never was, with round numbers."""

from dataclasses import replace

from tacit_lab import records

HERE = records.Environment(
    python="3.11.7",
    torch="2.13.0",
    tacit="0.1",
    cpu="A Processor",
    cores=2,
    kernel="6.1",
    date="2026-01-02T03:04:05+00:00",
)
HEAD = records.RunRecord(
    algorithm="ddp",
    strategy="Strategy(name='ddp')",
    recipe="digits",
    cluster="2x2@100mbit",
    shaped=True,
    seed=0,
    epochs=2,
    target=0.95,
    batch_per_rank=16,
    world_size=4,
    parameters=983114,
    environment=HERE,
)
DDP = records.EndRecord(
    algorithm="ddp",
    status="ok",
    seconds=60.0,
    mb_between_nodes=1000.0,
    accuracy=0.98,
    loss=0.07,
    seconds_to_target=30.0,
    metrics={"rounds": 0, "exposed_seconds": 0.0, "compute_share": 1.0},
)
TOPK = records.EndRecord(
    algorithm="topk:ratio=0.01",
    status="ok",
    seconds=10.0,
    mb_between_nodes=50.0,
    accuracy=0.972,
    loss=0.09,
    seconds_to_target=6.0,
    metrics={"rounds": 110, "exposed_seconds": 6.0, "compute_share": 0.4},
)
ALONE = records.EndRecord(algorithm=records.COMPUTE_ONLY, status="ok", seconds=3.0, mb_between_nodes=0.0)


def run(end: records.EndRecord, head: records.RunRecord = HEAD) -> list[records.Record]:
    """A whole run of two epochs that ends so."""
    seconds, mb = end.seconds or 1.0, end.mb_between_nodes
    epochs = [
        records.EpochRecord(
            algorithm=end.algorithm,
            epoch=epoch,
            step=10 * epoch,
            seconds=seconds * epoch / 2,
            loss=0.5 / epoch,
            accuracy=(0.5, 0.95)[epoch - 1],
            bytes_between_nodes=None if mb is None else int(mb * 1e6 * epoch / 2),
        )
        for epoch in (1, 2)
    ]
    return [replace(head, algorithm=end.algorithm), *epochs, end]


def comparison(*ends: records.EndRecord, head: records.RunRecord = HEAD) -> list[records.Record]:
    """The records of all these runs."""
    return [record for end in ends for record in run(end, head)]


WHOLE = comparison(DDP, TOPK, ALONE)
