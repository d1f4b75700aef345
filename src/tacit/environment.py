"""The environment variables that tacit reads or sets: every name is here once.

One file repeats two of them, as it runs where tacit cannot be imported: `rank.py` of the testbed.
"""

from __future__ import annotations

ALGORITHM = "TACIT_ALGORITHM"
"""The strategy's text form. Set by `tacit run` or the user; read by `tacit.from_env`."""

CACHE = "TACIT_CACHE"
"""The folder for decoded images and trained networks. Set by the user; read by the recipes."""

CLUSTER = "TACIT_CLUSTER"
"""The emulated cluster's text form. Set by the testbed; read by a recipe's worker, for its records."""

CONNECTIONS = "TACIT_CONNECTIONS"
"""How many connections of Gloo two ranks have for an exchange. Set by the user; read by `attach`."""

DIAGNOSE = "TACIT_DIAGNOSE"
"""Where a diagnosis of the steps is saved. Set by `tacit diagnose` or the user; read by sessions."""

FOOTPRINT = "TACIT_FOOTPRINT"
"""The folder for each rank's and each server's report. Set by `tacit run`; read by sessions and servers."""

HUB = "TACIT_HUB"
"""host:port of the hub of replicas that come and go, or of several that take its place, with commas.

With plus signs between them several hubs share the parameters out.

Set by the user; read by `attach`.
"""

IMPORT = "TACIT_IMPORT"
"""Modules with algorithms and compressors of one's own, or their files, with commas.

Set by the option --import or the user; read where an algorithm is looked up, and by parameter servers.
"""

INTERFACE = "TACIT_INTERFACE"
"""The network interface of this node. Set by the testbed; read by the counter of a node's bytes."""

KERNELS = "TACIT_KERNELS"
"""Which kernels run: "reference" or "triton". Set by the user; read by the kernels' dispatch."""

MEMBERS = "TACIT_MEMBERS"
"""host:port of the store by which replicas that come and go find each other.

Set by the testbed or the user; read by `attach`.
"""

NODE = "TACIT_NODE"
"""The number of this node, from 0. Set by the testbed; read by the byte counter of `tacit run`."""

NODES = "TACIT_NODES"
"""How many nodes there are. Set by the testbed; read by the recipes' meter."""

NOTES = "TACIT_NOTES"
"""How a line on stderr begins that is a note for the command. Set by the testbed; read by ranks."""

PROFILE = "TACIT_PROFILE"
"""The folder for each rank's profile. Set by `tacit run --profile`; read by the runner of the script."""

RECORD = "TACIT_RECORD"
"""What of a script is recorded, as JSON. Set by `tacit predictor record`; read by the script's recorder."""

RESTORE = "TACIT_RESTORE"
"""Variables that differ between the ranks and their launcher, as JSON. Set and read by the testbed."""

SERVER_SECRET = "TACIT_SERVER_SECRET"
"""The secret that workers and parameter servers share. Set by the testbed or the user; read by both."""

SERVER_SECRET_FILE = "TACIT_SERVER_SECRET_FILE"
"""A file that holds that secret. Set by the user; read by workers and parameter servers."""

SERVERS = "TACIT_SERVERS"
"""host:port of each parameter server, with commas. Set by the testbed or the user; read by `attach`."""

STEP_PROFILE = "TACIT_STEP_PROFILE"
"""Where a profile of the steps is saved. Set by `tacit profile` or the user; read by sessions."""

TENSORBOARD = "TACIT_TENSORBOARD"
"""The folder for curves. Set by `tacit run --tensorboard`; read by sessions."""

TLS = "TACIT_TLS"
"""Which certificates of parameter servers are trusted: fingerprints, a file, or "system".

Set by the user; read by workers, who then speak TLS.
"""

TLS_CERTIFICATE = "TACIT_TLS_CERTIFICATE"
"""A file with the certificate that a worker shows. Set by the user; read by workers."""

TLS_KEY = "TACIT_TLS_KEY"
"""The file with its private key. Set by the user; read by workers."""

TRIAL = "TACIT_TRIAL"
"""A seed and a factor on the learning rate, as JSON. Set by `tacit compare` for a script; read by `trial`."""

WORKER = "TACIT_WORKER"
"""The number, from 0, of a worker that is started alone and so is rank 0 of its own world.

Set by the testbed or the user; read by `attach`, and by whatever writes a file for each rank.
"""

WORKERS = "TACIT_WORKERS"
"""How many such workers there are. Set by the testbed or the user; read by `attach`."""
