"""Named strategies, one file a paper. `parse` makes one from its text form.

A new algorithm is a file, and a row here: `tacit list` has the order of these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tacit.exports import homes, on_first_use

if TYPE_CHECKING:
    from tacit.algorithms.registry import ALGORITHMS as ALGORITHMS
    from tacit.algorithms.registry import algorithm as algorithm
    from tacit.algorithms.registry import known as known
    from tacit.algorithms.registry import parse as parse

    # isort: off
    from tacit.algorithms.ddp import ddp as ddp, dense as dense
    from tacit.algorithms.auto import auto as auto
    from tacit.algorithms.bf16 import bf16 as bf16
    from tacit.algorithms.fp16 import fp16 as fp16
    from tacit.algorithms.fp8 import fp8 as fp8
    from tacit.algorithms.int8 import int8 as int8
    from tacit.algorithms.sign import sign as sign
    from tacit.algorithms.efsign import efsign as efsign
    from tacit.algorithms.onebit import onebit as onebit
    from tacit.algorithms.onebit_adam import onebit_adam as onebit_adam
    from tacit.algorithms.signsgd import signsgd as signsgd
    from tacit.algorithms.qsgd import qsgd as qsgd
    from tacit.algorithms.terngrad import terngrad as terngrad
    from tacit.algorithms.natural import natural as natural
    from tacit.algorithms.natural_dithering import natural_dithering as natural_dithering
    from tacit.algorithms.three_lc import three_lc as three_lc
    from tacit.algorithms.topk import topk as topk
    from tacit.algorithms.gtopk import gtopk as gtopk
    from tacit.algorithms.dgc import dgc as dgc
    from tacit.algorithms.randomk import randomk as randomk
    from tacit.algorithms.threshold import threshold as threshold
    from tacit.algorithms.stc import stc as stc
    from tacit.algorithms.ef21_sgdm import ef21_sgdm as ef21_sgdm
    from tacit.algorithms.demo import demo as demo
    from tacit.algorithms.oktopk import oktopk as oktopk
    from tacit.algorithms.sketched_sgd import sketched_sgd as sketched_sgd
    from tacit.algorithms.gradientflow import gradientflow as gradientflow
    from tacit.algorithms.adacomp import adacomp as adacomp
    from tacit.algorithms.gspar import gspar as gspar
    from tacit.algorithms.powersgd import powersgd as powersgd
    from tacit.algorithms.dion import dion as dion
    from tacit.algorithms.atomo import atomo as atomo
    from tacit.algorithms.lag import lag as lag
    from tacit.algorithms.laq import laq as laq
    from tacit.algorithms.fusion import fusion as fusion
    from tacit.algorithms.priority import priority as priority
    from tacit.algorithms.dear import dear as dear
    from tacit.algorithms.uneven import uneven as uneven
    from tacit.algorithms.pipesgd import pipesgd as pipesgd
    from tacit.algorithms.localsgd import localsgd as localsgd
    from tacit.algorithms.postlocal import postlocal as postlocal
    from tacit.algorithms.adacomm import adacomm as adacomm
    from tacit.algorithms.qsr import qsr as qsr
    from tacit.algorithms.easgd import easgd as easgd
    from tacit.algorithms.slowmo import slowmo as slowmo
    from tacit.algorithms.diloco import (
        diloco as diloco,
        streaming_diloco as streaming_diloco,
        eager_diloco as eager_diloco,
    )
    from tacit.algorithms.muloco import muloco as muloco, snoo as snoo
    from tacit.algorithms.sparseloco import sparseloco as sparseloco
    from tacit.algorithms.dilocox import dilocox as dilocox
    from tacit.algorithms.desloc import desloc as desloc
    from tacit.algorithms.lowbit import lowbit as lowbit
    from tacit.algorithms.zeroone_adam import zeroone_adam as zeroone_adam
    from tacit.algorithms.overlap_localsgd import overlap_localsgd as overlap_localsgd
    from tacit.algorithms.odsgd import odsgd as odsgd
    from tacit.algorithms.sparta import sparta as sparta
    from tacit.algorithms.ednncomm import ednncomm as ednncomm
    from tacit.algorithms.daso import daso as daso
    from tacit.algorithms.gossip import gossip as gossip, sgp as sgp, gossip_pga as gossip_pga
    from tacit.algorithms.choco import choco as choco
    from tacit.algorithms.gradient_tracking import gradient_tracking as gradient_tracking
    from tacit.algorithms.dcd import dcd as dcd
    from tacit.algorithms.deepsqueeze import deepsqueeze as deepsqueeze
    from tacit.algorithms.adpsgd import adpsgd as adpsgd
    from tacit.algorithms.wagma import wagma as wagma, prague as prague
    from tacit.algorithms.noloco import noloco as noloco
    from tacit.algorithms.ps import (
        ps as ps,
        ps_async as ps_async,
        ps_ssp as ps_ssp,
        ps_topk as ps_topk,
        ps_dgc as ps_dgc,
    )
    from tacit.algorithms.async_diloco import async_diloco as async_diloco
    from tacit.algorithms.mp2 import mp2 as mp2
    from tacit.algorithms.wnn import wnn as wnn
    from tacit.algorithms.predictive import predictive as predictive
    # isort: on
else:
    __getattr__ = on_first_use(__name__)


def __dir__() -> list[str]:
    return [*homes(__name__)]
