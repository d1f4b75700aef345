import pytest
import torch

from tacit.doors.flat import flat_view
from tacit.errors import AttachError

DENSE = [
    torch.rand(4, 3, 5, 5),
    torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last),
    torch.rand(4, 3, 1, 1).to(memory_format=torch.channels_last),
    torch.rand(1, 3, 5, 5).to(memory_format=torch.channels_last),
    torch.rand(6, 7).T,
    torch.rand(20)[5:10],
    torch.rand(20)[6:18].view(3, 4).T,
    torch.rand(()),
    torch.rand(0, 3).T,
]


@pytest.mark.parametrize("tensor", DENSE, ids=lambda t: f"{tuple(t.shape)} {t.stride()}")
def test_a_row_holds_each_element_once_and_is_no_copy(tensor: torch.Tensor) -> None:
    row = flat_view(tensor)
    assert row.shape == (tensor.numel(),)
    assert row.data_ptr() == tensor.data_ptr()
    assert torch.equal(row.sort().values, tensor.flatten().sort().values)
    row.fill_(7)
    assert (tensor == 7).all()


@pytest.mark.parametrize(
    "tensor", [torch.rand(4, 6)[:, ::2], torch.rand(3).expand(4, 3), torch.rand(9, 9)[:3, :3]]
)
def test_what_is_not_dense_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(AttachError, match=r"has gaps or overlaps, give its module a dense one"):
        flat_view(tensor)
