"""What tests of members in this process share."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tacit.transports.member_links import served


@pytest.fixture
def store() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    serves = served("127.0.0.1", 0)
    yield f"127.0.0.1:{serves.port}"
    dist.destroy_process_group()
