"""What needs a GPU: collected everywhere, run where torch sees one."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tacit.transports import torch_distributed as transport


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/cuda/" in str(item.path).replace(os.sep, "/"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(scope="session")
def nccl() -> Iterator[None]:
    """A world of one rank on NCCL, which launches its collectives all the same."""
    transport.ALONE_TOO = True
    os.environ.setdefault("GROUP_RANK", "0")
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    yield
    dist.destroy_process_group()
    transport.ALONE_TOO = False
