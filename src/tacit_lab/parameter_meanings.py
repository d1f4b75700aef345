"""What each parameter of tacit's algorithms means, in one line, for `tacit list NAME`."""

from __future__ import annotations

_PROGRESS = "bits an entry: 32 (fp32), 16 (bf16), or 2 to 8 (QSGD)"
_VALUES = "how the chosen entries are written; fp32 is exact"
_OF_QSGD = "of values=qsgd, 2 to 8; None: 4"
_OUTER = "the momentum of the outer steps; 0: none"

BY_NAME = {
    "allow_lost": "whether the others go on without ranks that have died",
    "anchor_bits": "bits an entry of anchors and outer momenta, as they are kept: 32, or 16 (bf16, rounded "
    "at random)",
    "backup_workers": "so many workers need not be waited for",
    "bits": _PROGRESS,
    "buffers": "BatchNorm's statistics: averaged in each round; local until the session closes; on_sync also "
    "when session.sync() is called",
    "bucket": "so many entries share a scale, a power of two",
    "by": "which ranks of a machine send: all of them a slice each, the first one (leaders), or one a round "
    "(turns)",
    "by_staleness": "whether a push counts less the more of others were applied since its worker pulled",
    "chunk": "each choice is among so many entries; None: among all of a bucket",
    "codec": "how a difference is written: its largest entries (topk), or 1 (sign), 4 (qsgd), 8 (int8) bits "
    "an entry",
    "compensation": "DC-ASGD's lambda, for late gradients, with optimizer=server; 0: none",
    "compressor": "how gradients are written; none: as they are",
    "credit": "so many megabytes may be under way at once; None: any number",
    "deadline": "seconds after which a worker sends no more of a push; None: all is sent",
    "decay": "the share of the residual that is kept from round to round",
    "entropy": "an entropy code writes the same numbers in fewer bytes, whose number follows from them",
    "first_every": "Adam's first moments are averaged every so many steps; None: 3 times sync_every",
    "fragment_sync_delay": "a part's mean is applied so many steps after its round, which hides the exchange",
    "fragments": "so many parts of the model have their rounds in turn",
    "gamma": "how far a replica moves to its neighbours; None: by codec, 0.05 to 0.5; less is safer",
    "global_every": "in every so many-th round all ranks are averaged",
    "graph": "which ranks are neighbours",
    "group_size": "ranks of a group, a power of two",
    "late": "an answer is applied so many steps later, which hides the exchange",
    "masking": "whether the momentum of entries that were sent begins anew at 0",
    "max_norm": "gradients are clipped to this norm of their mean before they are compressed; None: not",
    "megabytes": "gradients are joined up to this size; None: by a plan, from the first steps",
    "momentum": "the optimizer's momentum and moments in a round: local to each replica, averaged, or reset",
    "nesterov": "whether the momentum is Nesterov's",
    "optimizer": "whose optimizer steps: each worker's, or the server's",
    "outer_lr": "the learning rate of the outer steps",
    "outer_momentum": _OUTER,
    "predictor": "what predicts the entries that are not sent",
    "pull": "how the server's answers are written",
    "push": "how what goes to the server is written",
    "rank": "columns of the two thin matrices as whose product a matrix travels",
    "ratio": "the share of the entries that travels, above 0 to 1",
    "refresh": "for so many steps it moves again, at 1.5, 2.25, 3.4 ... times freeze_step",
    "residual_bits": "bits an entry of what was not sent, as it is kept: 32, or 16 (bf16, rounded at random)",
    "second_every": "Adam's second moments are averaged every so many steps; None: 6 times sync_every",
    "sync_every": "steps from round to round",
    "topology": "how ranks exchange; hierarchical: inside machines first; all words: docs/combining.md",
    "values": _VALUES,
    "variance": "Adam's, of replicas that step alone: scaled to that of the mean gradient, or local",
    "warmup_steps": "over so many steps the ratio falls from a quarter to `ratio`; 0: no warm-up",
    "weights": "the file of a trained predictor; None: the one that comes with tacit",
}
"""Parameter -> what it means wherever it has no entry in `BY_ALGORITHM`."""

BY_ALGORITHM = {
    "auto": {
        "accept": "what may be chosen: exact, with DDP's numbers; rounded, also 16, 8 or 4 bits an entry; "
        "feedback, also what sends the rest later; periodic, also replicas that step alone",
        "watch": "over so many steps a step's time is compared with the prediction; None: the choice stays",
        "tolerance": "by this share the two may differ before there is another choice",
        "rest": "so many steps, or more, are between two choices",
    },
    "fp8": {"format": "e4m3 has 4 bits of precision over 5 decades, e5m2 has 3 over 9"},
    "onebit-adam": {
        "freeze_step": "up to this step Adam's variance moves as usual, then it is kept: write a fifth of "
        "the training's steps",
        "refresh": "for so many steps it moves again, at 1.5, 2.25, 3.4 ... times freeze_step; 0: never",
        "bits": "bits an entry of the momentum, 1 to 8",
        "beta": "Adam's betas[0]",
    },
    "qsgd": {
        "bits": "bits an entry, 2 to 8",
        "scale": "what an entry is a fraction of: its bucket's largest magnitude, or its norm",
    },
    "natural-dithering": {"bits": "bits an entry, 2 to 5"},
    "three-lc": {"sparsity": "from 1 to below 2; more makes more zeros, and shorter messages"},
    "terngrad": {"clip": "an entry is cut to so many root mean squares of its bucket; None: not"},
    "topk": {"bits": _OF_QSGD},
    "dgc": {"momentum": "of SGD, which is taken over from the optimizer", "bits": _OF_QSGD},
    "signsgd": {"momentum": "of SGD, taken over from the optimizer: its sign is voted on; 0: the gradient's"},
    "ef21-sgdm": {"momentum": "of SGD, which is taken over from the optimizer"},
    "demo": {
        "k": "so many coefficients of each chunk x chunk travel",
        "chunk": "a cosine transform is of so many entries in a row",
        "decay": "the share of the momentum that is kept from step to step",
    },
    "sketched-sgd": {"width": "sums in each of the sketch's five rows, as a share of the entries"},
    "gradientflow": {
        "ratio": "the share of the chunks that travels, above 0 to 1",
        "chunk": "entries that travel together, or not",
    },
    "adacomp": {
        "bin": "of so many entries in a row those travel that are soon the largest",
        "capacity": "at most this share of the entries travels in a round",
    },
    "randomk": {"unbiased": "multiply what is sent by 1 / ratio, and keep no residual"},
    "threshold": {
        "tau": "an entry travels when its magnitude has reached this",
        "capacity": "at most this share of the entries travels in a round",
    },
    "powersgd": {
        "min_compression_rate": "a matrix travels as it is, unless so many times fewer numbers would travel"
    },
    "dion": {
        "rank": "columns of the two thin matrices whose product is a step",
        "momentum": "the share of a step's direction that each rank keeps",
    },
    "atomo": {"rank": "so many singular directions of a matrix travel"},
    "laq": {
        "xi": "how much a gradient may change before it travels again; more sends less",
        "window": "a change is compared with so many of the last means",
        "bits": "bits an entry of a change, 2 to 8",
    },
    "lag": {
        "xi": "how much a gradient may change before it travels again; more sends less",
        "window": "a change is compared with so many of the last means",
    },
    "uneven": {"rates": "each rank's link in Mbit/s, such as 1000/1000/100; None: they are measured"},
    "pipesgd": {"warmup_steps": "the first so many steps are synchronous"},
    "postlocal": {"start_step": "up to this step training is synchronous"},
    "adacomm": {
        "sync_every": "steps from round to round at first",
        "interval": "the period is chosen anew every so many steps",
    },
    "qsr": {
        "sync_every": "the least steps from round to round",
        "alpha": "the period is (alpha / learning rate) squared; None: sync_every at the largest rate",
        "longest": "the most steps from round to round",
    },
    "easgd": {
        "beta": "how far the centre moves to the replicas in a round, and they by 1 / P of it to the centre"
    },
    "slowmo": {"momentum": _OUTER, "slow_lr": "the learning rate of the outer steps"},
    "streaming-diloco": {
        "fragment_update_alpha": "the share of its own parameters that a replica keeps when an answer comes"
    },
    "muloco": {
        "bits": "bits an entry: 32 (fp32), 16 (bf16), or 2 to 8 with error feedback",
        "decay": "with 2 to 8 bits, the share of the residual that is kept from round to round; None: 0.9",
    },
    "snoo": {"sync_every": "steps from one outer step to the next"},
    "sparseloco": {
        "k": "so many entries of each chunk travel",
        "chunk": "k are chosen of each so many entries",
        "bits": "of a chosen entry, 2 to 8; None: fp32",
    },
    "dilocox": {"bits": "bits an entry of the thin matrices"},
    "lowbit": {
        "bits": "bits an entry, 2 to 8",
        "late": "1: an answer is applied as the next round leaves",
        "entropy": "an entropy code writes the entries, of 2 to 4 bits, in fewer",
        "bound": "at a parameter server, by so many rounds a worker may be ahead of the slowest; None: all "
        "wait for all",
        "predictor": "predict from the last change, or from three (least squares), and send the rest; None: "
        "do not",
        "variance": "Adam's: scaled to that of the mean gradient, or local; None: scaled, without `bound`",
    },
    "zeroone-adam": {
        "freeze_step": "up to this step Adam's variance moves as usual, then it is kept: write "
        "3 / (1 - beta2), so 60 for beta2 = 0.95, and 3000 for torch's 0.999",
        "bits": "bits an entry of the progress, 2 to 8",
        "entropy": "an entropy code writes entries of 2 to 4 bits in fewer",
        "gradient_bits": "bits an entry of the gradients, in steps in which these travel, 3 to 8",
    },
    "sparta": {"ratio": "the share of the parameters that is averaged in a round, above 0 to 1"},
    "overlap-localsgd": {
        "alpha": "how far a replica is pulled to the common anchor, above 0 to 1",
        "momentum": "of the anchor; 0: none",
    },
    "ednncomm": {"sync_every": "steps from round to round between machines; auto: an epoch"},
    "daso": {
        "period": "steps from round to round between machines; auto: the fewest that hide it",
        "delay": "an answer from other machines is applied so many steps later",
        "local": "gradients are averaged inside a machine in every so many-th step",
        "max_period": "the period after the loss has stopped falling at a period of 1",
        "warmup_epochs": "so many epochs at first have a round after every step; None: a tenth, 4 at most",
        "cooldown_epochs": "the same of the last epochs",
        "patience": "so many epochs without improvement shorten the period",
        "threshold": "by this share the loss must fall to have improved",
        "staleness": "how much a replica's own parameters count for each step that an answer is late",
        "bits": "bits an entry: 32 (fp32), 16 (bf16), or 2 to 8 (QSGD); paper: 32, and 16 where ranks wait",
    },
    "choco": {"ratio": "with codec=topk, the share of the entries that travels; None: 0.01"},
    "dcd": {"bits": "bits an entry, 3 to 8"},
    "deepsqueeze": {"ratio": "with codec=topk, the share of the entries that travels; None: 0.1"},
    "adpsgd": {"graph": "which ranks a rank may be paired with"},
    "wagma": {
        "group_size": "ranks of a group, a power of two; None: near the root of their number",
        "wait": "whether a group waits for all of its ranks",
        "allow_lost": "whether the others go on without ranks that have died; with wait=false",
    },
    "ps": {
        "ratio": "with push or pull topk, the share of the entries that travels; None: 0.01",
        "bits": "with push or pull qsgd, bits an entry, 2 to 8; None: 4",
    },
    "ps-async": {
        "ratio": "with push or pull topk, the share of the entries that travels; None: 0.01",
        "bits": "with push or pull qsgd, bits an entry, 2 to 8; None: 4",
    },
    "ps-ssp": {
        "bound": "by so many steps a worker may be ahead of the slowest",
        "ratio": "with push or pull topk, the share of the entries that travels; None: 0.01",
        "bits": "with push or pull qsgd, bits an entry, 2 to 8; None: 4",
    },
    "async-diloco": {
        "delay": "the server's momentum steps after so many pushes, each of which counts 1 / delay; None: as "
        "many as there are workers",
    },
    "ps-topk": {"bits": _OF_QSGD},
    "ps-dgc": {"momentum": "of SGD, which is taken over from the optimizer", "bits": _OF_QSGD},
    "mp2": {
        "budget": "bytes, as a share of those of plain training",
        "subset": "which entries travel: each in its turn (rotating), at random, layer by layer, or the "
        "largest",
        "values": "how entries are written; fp32 is exact",
        "shrink": "predictions are multiplied by this, above 0 to 1",
        "full_rounds": "the first so many rounds send everything",
        "drops": "so many more rounds send everything, each after the learning rate was halved",
        "horizon": "the budget is for so many steps; None: those that attach was told, or 100",
        "pull": "subset: every rank predicts; full: a server does, and all is pulled",
        "rescale": "whether an entry that is sent counts for the rounds without it, too; None: where it fits",
    },
    "predictive": {
        "ratio": "the share of the entries that travels, those that were predicted worst",
        "trust": "the prediction is the last change times this, 0 to 1",
        "values": _VALUES,
    },
    "wnn": {"period": "rounds of a period; after five the replicas leap five ahead"},
}
"""Algorithm -> parameter -> what it means there."""


def meaning(algorithm: str, parameter: str) -> str:
    """What a parameter of an algorithm of tacit means."""
    return BY_ALGORITHM.get(algorithm, {}).get(parameter) or BY_NAME[parameter]
