"""A process that encodes by every family of kernels and says which they were; see `test_dispatch`.

Usage: encode_all.py [--without-numba] [--without-session]
"""

import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path


class NoNumba:
    """Finds everything but numba."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "numba":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if "--without-numba" in sys.argv:
    sys.meta_path.insert(0, NoNumba())  # type: ignore[arg-type]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import tacit  # noqa: E402
from tacit.kernels import blockwise, exponents, int8, levels, positions, select, signs  # noqa: E402
from tacit.kernels.dispatch import find_backend  # noqa: E402
from tacit.kernels.payload_layout import blocks_bytes, position_bytes  # noqa: E402


def bits() -> str:
    """The digest of what all of them write for the same numbers."""
    x, residual = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3))
    residuals, out = [torch.empty(5000) for _ in range(2)], torch.zeros(5000)
    packed, means = torch.empty(625, dtype=torch.uint8), torch.empty(10)
    codes, units = torch.empty(2500, dtype=torch.uint8), torch.empty(10)
    bytes8, units8 = torch.empty(5000, dtype=torch.uint8), torch.empty(10)
    powers, ups = torch.empty(5000, dtype=torch.uint8), torch.empty(625, dtype=torch.uint8)
    signs.encode_signs(x, packed, means, None, False, residual, residuals[0])
    signs.add_signs_([(packed, means, None)] * 2, 0.3, out, fresh=False)
    levels.quantize(x, 4, 512, levels.BY_NORM, 11, codes, units)
    levels.add_levels_([(codes, units)] * 2, 4, 512, 0.3, out, fresh=False)
    int8.encode_int8(x, bytes8, units8, residual, residuals[1])
    int8.add_int8_([(bytes8, units8)], 0.3, out, fresh=False)
    exponents.encode_exponents(x, 12, powers, ups)
    exponents.add_exponents_([(powers, ups)], 0.3, out, fresh=False)
    threes, scales = (
        torch.empty(blocks_bytes(5000, 3), dtype=torch.uint8),
        torch.empty(10, dtype=torch.bfloat16),
    )
    after = torch.empty(5000)
    blockwise.encode_blocks(x, 3, threes, scales, residual, after)
    blockwise.add_blocks_([(threes, scales)] * 2, 3, 0.3, out, fresh=False)
    chosen = select.select_largest(x, 50, residual=residual, new_residual=torch.empty(5000))
    where = torch.empty(position_bytes(5000, 50), dtype=torch.uint8)
    positions.pack_positions(chosen.positions, 5000, 50, where)
    positions.scatter_add_(positions.unpack_positions(where, 5000, 50), chosen.values, out, 0.3)
    parts = (packed, means, codes, units, bytes8, units8, powers, ups, where, chosen.values, *residuals, out)
    parts = *parts, threes, scales.view(torch.uint8), after
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def at_work() -> str:
    """What a session says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=(Path(folder) / "store").as_uri(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 3))
        with tacit.attach(model, torch.optim.SGD(model.parameters()), "efsign") as session:
            said = session.active_path
        dist.destroy_process_group()
    return said


with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    answer = {"bits": bits(), "path": "kernels: " + find_backend("cpu").description}
    if "--without-session" not in sys.argv:
        answer["path"] = at_work()
ours = [str(each.message) for each in heard if "compressors" in str(each.message)]
loaded = any(name.startswith("tacit.kernels.triton") for name in sys.modules)
print(json.dumps(answer | {"warned": ours, "triton": loaded}))
