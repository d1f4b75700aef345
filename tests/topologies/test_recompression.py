"""The price of compressing a mean again: the same to the bit whatever kernels are loaded, and none needed."""

import pytest

from tacit.compressors import Int8, Sign, TernGrad, TopK
from tacit.contracts import OneShot
from tacit.kernels import dispatch
from tacit.topologies.recompression import loss


@pytest.mark.parametrize("codec", [Int8(), Sign(), TernGrad(), TopK(ratio=0.01)], ids=repr)
def test_plain_torch_loses_the_same_and_loads_no_compiler(
    monkeypatch: pytest.MonkeyPatch, codec: OneShot
) -> None:
    expected = loss(codec)

    def compiled(device: str) -> str:
        raise AssertionError(f"kernels were asked for on {device}")

    monkeypatch.setattr(dispatch, "active_backend", compiled)
    with dispatch.plain_torch():
        assert loss(codec) == expected
    with pytest.raises(AssertionError, match="kernels were asked for on cpu"):
        loss(codec)
