"""MuLoCo (Thérien et al. 2025, arXiv 2505.23725) and SNOO (Kallusky et al. 2025, arXiv 2510.15830).

MuLoCo is DiLoCo with Muon inside, in each outer step on worker r:  here:
    theta_r <- H steps of Muon from theta                           the user's optimizer
    e_r <- beta e_r + (theta - theta_r); s_r <- Q(e_r)              ErrorFeedback(decay), for `bits` of 2 to 8
    e_r <- e_r - s_r
    theta <- OuterOpt(theta, mean_r(s_r)), Nesterov                 OuterStep(lr, momentum), as torch's SGD

Muon is yours: torch.optim.Muon for the matrices and AdamW for the rest, both given to `attach`. It sees whole
matrices, and works on shards only if it gathers them itself. `outer_lr`, `outer_momentum` and `sync_every`
are those of the authors' package for one worker (github.com/bentherien/muloco-1, README); their example for
two workers has 0.9 and 0.8. `decay` is that of their example with error feedback (facebookresearch/MuLoCo,
2x_4gpu_muloco_quantized_outer.py).

Differences from the authors' code: it multiplies the delta by the outer rate before it is compressed, too,
and parts values by the spread of a tensor, which with two bits they found better than equal steps; here two
bits are a sign and two magnitudes of each 512 entries, and more bits QSGD's equal steps. From 3 ranks on,
where that sends less, the mean is rounded once more when it is sent, with error feedback (Auto, TwoPhase);
they simulate it.

SNOO is DiLoCo's outer step with one worker:                        here:
    K steps of any optimizer from w, of all ranks: w'               DDP's mean gradient in every step
    s <- w - w'; b <- mu b + s; w <- w - eta (mu b + s)             OuterStep(eta, mu), as torch's SGD

All ranks together are the worker, be it one rank or many; the ranks of one FSDP2 model too, on a mesh whose
far axis has one rank. So nothing is saved on the wire, and with several ranks of DDP a little is sent more:
the deltas, which are equal, are averaged once in K steps. In the authors' code
(vishal9-team/torchtitan-snoo, diloco_adapter.py) each rank steps by its own shards, and sends nothing. With
`outer_momentum=0` it is Lookahead. K, eta and mu are the paper's for 125 million parameters, as two
accounts of it quote them; of the paper the abstract and the introduction were read.
"""

from __future__ import annotations

from dataclasses import replace

from tacit.algorithms.diloco import diloco
from tacit.algorithms.options.codecs import few_bits, of_bits
from tacit.algorithms.options.named_options import AdditiveWay
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback
from tacit.errors import ConfigError
from tacit.strategy import Levels, Strategy


@algorithm(
    family="periodic",
    paper="MuLoCo: Thérien et al. 2025, arXiv 2505.23725",
    compresses=False,
    changes="DiLoCo's outer steps, set for Muon as the optimizer inside",
)
def muloco(
    sync_every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    bits: int = 32,
    decay: float | None = None,
    topology: AdditiveWay = "auto",
) -> Strategy:
    """DiLoCo for Muon; `bits` from 2 to 8 have error feedback, of which `decay` (None: 0.9) is kept."""
    whole = diloco(sync_every, outer_lr, outer_momentum, topology=topology)
    written = of_bits(bits)
    if bits <= 8:
        written = ErrorFeedback(few_bits(bits), decay=0.9 if decay is None else decay)
    elif decay is not None:
        raise ConfigError(
            f"decay={decay!r} is of what few bits leave out, and bits={bits} has no residual: leave decay "
            "out, or write bits=4"
        )
    return replace(whole, compressor=written)


@algorithm(
    family="periodic",
    paper="SNOO: Kallusky et al. 2025, arXiv 2510.15830",
    compresses=False,
    changes="every so many synchronous steps an outer optimizer steps by their sum; one rank will do",
)
def snoo(sync_every: int = 100, outer_lr: float = 0.8, outer_momentum: float = 0.75) -> Levels:
    """Plain DDP, and an outer SGD with Nesterov momentum that steps by `sync_every` of its steps."""
    outer = replace(diloco(sync_every, outer_lr, outer_momentum), name="outer")
    return Levels((Strategy(name="synchronous"), outer))
