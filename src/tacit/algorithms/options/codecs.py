"""Compressors, as the words and numbers of the text form name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from tacit import checks, compressors  # of which only those load that are asked for
from tacit.contracts import Compressor, OneShot
from tacit.errors import ConfigError

if TYPE_CHECKING:
    from tacit.compressors.qsgd import QSGD

EntryValues: TypeAlias = Literal["fp32", "bf16", "fp16", "int8", "qsgd", "sign"]
"""The parameter `values` of a sparsifying algorithm: how the chosen entries are written; "fp32" is exact."""

_VALUES: dict[str, Callable[[], OneShot]] = {
    "fp32": lambda: compressors.Dense(),
    "bf16": lambda: compressors.BF16(),
    "fp16": lambda: compressors.FP16(),
    "int8": lambda: compressors.Int8(),
    "qsgd": lambda: compressors.QSGD(),
    "sign": lambda: compressors.Sign(),
}
_LEVEL = "it is the length of one of QSGD's levels; write 4"


def values_of(values: str, bits: int | None) -> OneShot:
    """What writes the chosen entries.

    Args:
        values: one of `EntryValues`.
        bits: of a level of "qsgd", 2 to 8; None: 4, and with all other words.

    Raises:
        ConfigError: there is no such word, or its entries do not come in so many bits.
    """
    checks.one_of("values", values, tuple(_VALUES))
    if bits is None:
        return _VALUES[values]()
    if values != "qsgd":
        raise ConfigError(f"bits={bits!r} is for values='qsgd', not {values!r}: leave one of them out")
    return levels_of(bits)


def levels_of(bits: int) -> QSGD:
    """QSGD of so many bits an entry, 2 to 8.

    Raises:
        ConfigError: it has no such levels.
    """
    checks.whole("bits", bits, 2, 8, _LEVEL)
    return compressors.QSGD(bits=bits)


def coded(codec: OneShot, entropy: bool) -> OneShot:
    """The codec, with the bytes of its payload entropy coded where `entropy` is true."""
    checks.flag("entropy", entropy)
    return compressors.ByteCoded(codec) if entropy else codec


def of_bits(bits: int) -> Compressor:
    """What sends each entry of a delta in so many bits: 32 (fp32), 16 (bf16), or 2 to 8 (QSGD).

    Raises:
        ConfigError: nothing has so many.
    """
    checks.whole("bits", bits, 2, 32, "write 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)")
    if bits == 32:
        return compressors.Dense()
    if bits == 16:
        return compressors.BF16()
    if 2 <= bits <= 8:
        return compressors.QSGD(bits=bits)
    raise ConfigError(f"bits={bits} is not possible: write 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)")


def few_bits(bits: int, bucket: int = 512) -> OneShot:
    """What is for error feedback in so many bits an entry, 2 (a sign and two magnitudes) to 8 (QSGD).

    `bucket`: how many entries share a scale, a power of two.

    Raises:
        ConfigError: nothing has so many.
    """
    checks.whole("bits", bits, 2, 8, "write 2 (a sign and two magnitudes), or 3 to 8 (QSGD)")
    two = bits == 2
    return compressors.TwoMagnitudes(bucket) if two else compressors.QSGD(bits=bits, bucket=bucket)
