"""A payload that is not whole, or not of this compressor, is refused before anything is written."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from laws import Bench, Peers, tensors
from table import NUMEL, TABLE
from torch import Tensor

from cases import for_each
from tacit.compressors import Dense, ErrorFeedback, OneBit, Sign, TopK
from tacit.contracts import AllGather, Context, OneShot, Payload
from tacit.errors import PayloadError
from tacit.kernels import dispatch
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.positions import scatter_add_, unpack_positions
from tacit.topologies import Flat


def inside(value: object) -> Iterator[OneShot]:
    if isinstance(value, OneShot):
        yield value
        return
    for each in dataclasses.fields(value):  # type: ignore[arg-type]
        given = getattr(value, each.name)
        for part in given if isinstance(given, tuple) else [given]:
            if dataclasses.is_dataclass(part):
                yield from inside(part)


CODECS = list(dict.fromkeys(codec for row in TABLE.values() for codec in inside(row.compressor)))
every_codec = pytest.mark.parametrize("codec", CODECS, ids=map(repr, CODECS))
both_ways = pytest.mark.parametrize("path", ["numba", "torch"])


def other_type(part: Tensor) -> Tensor:
    return part.to(torch.int16 if part.dtype == torch.uint8 else torch.float64)


SPOILT: dict[str, Callable[[Payload], Payload]] = {
    "no parts": lambda payload: (),
    "a part too many": lambda payload: (*payload, payload[-1]),
    "the first cut short": lambda payload: (payload[0][:-1].clone(), *payload[1:]),
    "the last cut short": lambda payload: (*payload[:-1], payload[-1][:-1].clone()),
    "the last empty": lambda payload: (*payload[:-1], payload[-1][:0].clone()),
    "the first too long": lambda payload: (torch.cat([payload[0], payload[0][:1]]), *payload[1:]),
    "the last too long": lambda payload: (*payload[:-1], torch.cat([payload[-1], payload[-1][:1]])),
    "the first of another type": lambda payload: (other_type(payload[0]), *payload[1:]),
    "the last of another type": lambda payload: (*payload[:-1], other_type(payload[-1])),
    "with gaps": lambda payload: (*payload[:-1], payload[-1].repeat_interleave(2)[::2]),
}


def payload_of(codec: OneShot, seed: int = 0) -> Payload:
    (x,) = tensors(1, NUMEL, seed)
    ctx = Context(out=torch.empty(NUMEL), work=Bench(), peers=2, name="bucket")
    return tuple(part.clone() for part in codec.encode(x, ctx))


@pytest.fixture
def kernels(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu": path)


@both_ways
@pytest.mark.usefixtures("kernels")
@for_each("spoil", SPOILT.values(), ids=SPOILT.keys())
@every_codec
def test_a_payload_of_another_size_or_type_is_refused(codec: OneShot, spoil: Callable) -> None:  # type: ignore[type-arg]
    whole, spoilt = payload_of(codec), spoil(payload_of(codec, 1))
    if spoil is SPOILT["with gaps"] and whole[-1].numel() == 1:
        return  # one element has no gaps
    out = torch.full((NUMEL,), 7.0)
    for decode in (
        lambda: codec.decode_(spoilt, out),
        lambda: codec.decode_add_(spoilt, out, 0.5),
        lambda: codec.decode_mean_([whole, spoilt], out),
    ):
        with pytest.raises(PayloadError, match=f"{NUMEL} entries has|another compressor"):
            decode()
        assert bool((out == 7.0).all())


def test_the_error_says_what_is_there_and_what_was_expected() -> None:
    bits, means = payload_of(Sign(block=512))
    with pytest.raises(
        PayloadError, match=r"for 1000 entries has 124 bytes of torch.uint8 as signs, where 125 bytes"
    ):
        Sign(block=512).decode_((bits[:-1], means), torch.empty(NUMEL))
    with pytest.raises(PayloadError, match=r"has 2 parts, where 3 are expected \(signs, high means, low"):
        OneBit().decode_((bits, means), torch.empty(NUMEL))


def test_what_another_compressor_sends_is_refused() -> None:
    for mine in CODECS:
        for theirs in CODECS:
            payload, own = payload_of(theirs), payload_of(mine)
            shapes = [(part.shape, part.dtype) for part in payload]
            if shapes != [(part.shape, part.dtype) for part in own]:
                with pytest.raises(PayloadError):
                    mine.decode_(payload, torch.empty(NUMEL))


def test_no_state_changes_when_a_peers_payload_is_not_whole() -> None:
    group = Peers(ErrorFeedback(TopK(ratio=0.01)), 2, NUMEL)
    group.exchange(tensors(2, NUMEL))
    state, x = group.states[0], tensors(1, NUMEL, 5)[0]
    before, given = {name: kept.clone() for name, kept in state.items()}, x.clone()
    talk = Flat().conduct(x, group.compressor, state, group._context(0, torch.empty(NUMEL)))
    request = next(talk)
    assert isinstance(request, AllGather)
    values, positions = request.payload
    with pytest.raises(PayloadError):
        talk.send([request.payload, (values, positions[:-1])])
    assert all(torch.equal(state[name], kept) for name, kept in before.items())
    assert torch.equal(x, given)


# ---- positions ----------------------------------------------------------------------------------------


@both_ways
@pytest.mark.usefixtures("kernels")
@for_each(("numel", "k"), [(1000, 500), (1000, 10), (10**6, 100), (10**6, 1), (300, 1)])
def test_bytes_at_random_are_positions_that_are_checked(numel: int, k: int) -> None:
    """Whatever arrives, nothing is written or read beyond the tensors."""
    generator = torch.Generator().manual_seed(0)
    for share in (0, 1, 20, 128, 255, 256):
        drawn = torch.randint(256, (2, position_bytes(numel, k)), generator=generator, dtype=torch.uint8)
        packed = torch.where(drawn[0] < share, drawn[1], 0).to(torch.uint8) if share < 256 else drawn[0] | 255
        guarded = torch.full((numel + 128,), 7.0)
        out = guarded[64:-64]
        with suppress(PayloadError):
            index = unpack_positions(packed, numel, k)
            scatter_add_(index, torch.ones(index.numel()), out)
        assert bool((guarded[:64] == 7).all() and (guarded[-64:] == 7).all())


@both_ways
@pytest.mark.usefixtures("kernels")
def test_high_parts_beyond_the_tensor_are_refused() -> None:
    (values, packed), out = payload_of(TopK(ratio=0.01)), torch.zeros(NUMEL)
    packed[10:] = torch.tensor([255, 128 + 2])  # the tenth one's rest is 15 - 9 = 6: beyond 6 * 256
    with pytest.raises(PayloadError, match="1 positions of a peer are not among 1000 entries"):
        TopK(ratio=0.01).decode_((values, packed), out)


@both_ways
@pytest.mark.usefixtures("kernels")
@for_each("bad", [[-1], [5, 1000], [2**31 - 1], [-(2**31)]])
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_positions_out_of_range_are_counted_and_refused(bad: list[int], dtype: torch.dtype) -> None:
    index = torch.tensor(bad, dtype=torch.int32)
    with pytest.raises(PayloadError, match=r"1 positions of a peer are not among 1000 entries"):
        scatter_add_(index, torch.ones(len(bad), dtype=dtype), torch.zeros(1000, dtype=dtype))


@both_ways
@pytest.mark.usefixtures("kernels")
def test_fewer_values_than_positions_are_refused() -> None:
    with pytest.raises(PayloadError, match="as entries"):
        scatter_add_(torch.arange(10, dtype=torch.int32), torch.ones(9), torch.zeros(1000))


def test_a_payload_whose_positions_are_fewer_than_its_values_is_refused() -> None:
    values, positions = payload_of(TopK(ratio=0.01))
    out = torch.full((NUMEL,), 7.0)
    with pytest.raises(PayloadError, match="as entries"):
        TopK(ratio=0.01).decode_((values, torch.zeros_like(positions)), out)
    assert bool((out == 7).all())


def test_dense_takes_its_own_tensor_for_whole() -> None:
    x = torch.ones(5)
    Dense().decode_((x,), x)
    assert bool((x == 1).all())
