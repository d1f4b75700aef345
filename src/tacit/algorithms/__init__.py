"""Named strategies, one file a paper. `parse` makes one from its text form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tacit.algorithms.adacomm import adacomm
from tacit.algorithms.bf16 import bf16
from tacit.algorithms.daso import daso
from tacit.algorithms.ddp import ddp, dense
from tacit.algorithms.dgc import dgc
from tacit.algorithms.diloco import diloco, streaming_diloco
from tacit.algorithms.easgd import easgd
from tacit.algorithms.ednncomm import ednncomm
from tacit.algorithms.efsign import efsign
from tacit.algorithms.fp8 import fp8
from tacit.algorithms.fp16 import fp16
from tacit.algorithms.gtopk import gtopk
from tacit.algorithms.int8 import int8
from tacit.algorithms.lag import lag
from tacit.algorithms.localsgd import localsgd
from tacit.algorithms.mp2 import mp2
from tacit.algorithms.natural import natural
from tacit.algorithms.odsgd import odsgd
from tacit.algorithms.onebit import onebit
from tacit.algorithms.overlap_localsgd import overlap_localsgd
from tacit.algorithms.pipesgd import pipesgd
from tacit.algorithms.postlocal import postlocal
from tacit.algorithms.powersgd import powersgd
from tacit.algorithms.predictive import predictive
from tacit.algorithms.ps import ps, ps_async, ps_dgc, ps_ssp, ps_topk
from tacit.algorithms.qsgd import qsgd
from tacit.algorithms.randomk import randomk
from tacit.algorithms.sign import sign
from tacit.algorithms.signsgd import signsgd
from tacit.algorithms.slowmo import slowmo
from tacit.algorithms.stc import stc
from tacit.algorithms.terngrad import terngrad
from tacit.algorithms.threshold import threshold
from tacit.algorithms.topk import topk
from tacit.algorithms.wnn import wnn
from tacit.errors import ConfigError, unknown
from tacit.strategy import AnyStrategy, split_text, typed

ALGORITHMS: dict[str, Callable[..., AnyStrategy]] = {
    "ddp": ddp,
    "dense": dense,
    "bf16": bf16,
    "fp16": fp16,
    "fp8": fp8,
    "int8": int8,
    "sign": sign,
    "efsign": efsign,
    "onebit": onebit,
    "signsgd": signsgd,
    "qsgd": qsgd,
    "terngrad": terngrad,
    "natural": natural,
    "topk": topk,
    "gtopk": gtopk,
    "dgc": dgc,
    "randomk": randomk,
    "threshold": threshold,
    "stc": stc,
    "powersgd": powersgd,
    "lag": lag,
    "pipesgd": pipesgd,
    "localsgd": localsgd,
    "postlocal": postlocal,
    "adacomm": adacomm,
    "easgd": easgd,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming-diloco": streaming_diloco,
    "overlap-localsgd": overlap_localsgd,
    "odsgd": odsgd,
    "ednncomm": ednncomm,
    "daso": daso,
    "ps": ps,
    "ps-async": ps_async,
    "ps-ssp": ps_ssp,
    "ps-topk": ps_topk,
    "ps-dgc": ps_dgc,
    "mp2": mp2,
    "wnn": wnn,
    "predictive": predictive,
}
"""Name -> the function that makes the strategy; its typed parameters are the algorithm's."""


def known() -> list[str]:
    """The names of all algorithms."""
    return list(ALGORITHMS)


def parse(text: str) -> AnyStrategy:
    """The strategy of a text such as `"topk:ratio=0.01"`.

    Raises:
        ConfigError: unknown algorithm or parameter, or a value that cannot be; says what to write.
    """
    name, pairs = split_text(text)
    if not name:
        raise ConfigError(f"{text!r} names no algorithm: write one of {', '.join(known())}")
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, known())
    build = ALGORITHMS[name]
    return replace(build(**typed(name, build, pairs)), name=text.strip())
