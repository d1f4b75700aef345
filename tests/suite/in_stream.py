"""The algorithms that run on a GPU in stream order: all of the registry, so that none is forgotten."""

from torch import nn

from tacit.algorithms import parse
from tacit.algorithms.registry import ENTRIES
from tacit.levels.device_placement import needs_host
from tacit.session.buckets import fitting

OPTIONS = {
    "topk": ("ratio=0.05", "ratio=0.05,chunk=1000", "ratio=0.05,entropy=true"),
    "int8": ("", "entropy=true"),
    "streaming-diloco": ("sync_every=4,fragments=2,fragment_sync_delay=2,bits=4",),
    "diloco": ("sync_every=3,bits=4",),
    "uneven": ("rates=1000/1000/1000/100",),
    "threshold": ("tau=0.01",),
    "randomk": ("ratio=0.1",),
    "ednncomm": ("sync_every=2",),
    **dict.fromkeys(("powersgd", "dion"), ("rank=2",)),
    **dict.fromkeys(("dgc", "gtopk", "ef21-sgdm"), ("ratio=0.05",)),
    **dict.fromkeys(
        ("localsgd", "slowmo", "easgd", "overlap-localsgd", "adacomm", "sparseloco", "muloco", "snoo",
         "desloc", "dilocox", "predictive", "eager-diloco", "noloco"),
        ("sync_every=3",),
    ),
}  # fmt: skip
"""Of those whose rounds would not come in ten steps of so small a model, or would be too small."""


def in_stream() -> list[str]:
    """Every algorithm of the registry that runs on a GPU in stream order, with its options; not `auto`."""
    layers = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 5))
    named = dict(layers.named_parameters())

    def runs(name: str) -> bool:
        levels = [level for level in parse(name).levels if level.subject != "nothing"]
        return not any(needs_host(level, named, fitting(level.compressor, named)) for level in levels)

    names = [name for name in ENTRIES if name != "auto" and runs(name)]
    assert {*OPTIONS} <= {*names}
    return [f"{name}:{each}" if each else name for name in names for each in OPTIONS.get(name, ("",))]


IN_STREAM = in_stream()
