"""With which ranks, and by which collectives."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from tacit.contracts.common import WORLD, Spans, State
from tacit.contracts.compressor import Compressor, Exchange, PayloadSpec, Request
from tacit.contracts.context import AxisRank, Context
from tacit.contracts.merge import Merge
from tacit.contracts.overlap import Overlap
from tacit.contracts.rounds import Rounds
from tacit.errors import ConfigError


class Options(NamedTuple):
    """The topologies that a session chooses from: the first, unless another sends fewer weighted bytes."""

    topologies: tuple[Topology, ...]
    because: str = ""
    """The reason, where a choice was possible and only one topology fits."""
    prices: tuple[float, ...] = ()
    """The weight of a byte of each topology, as some lose more by compression; empty: 1 for all."""
    delays: tuple[float, ...] = ()
    """The bytes that a link would carry while messages of each topology are on the way; empty: 0 for all."""


class Topology(ABC):
    """With which ranks replicas exchange, by which collectives.

    Attributes:
        scope: the axis of the replicas that are equal after a round.
        meets: the axis on which compressors exchange.
    """

    in_pairs: ClassVar[bool] = False
    """Whether each rank has a store of its parameters (`PairTopology`)."""
    mixes: ClassVar[bool] = False
    """Whether each rank gets another answer (`MixingTopology`)."""

    scope: str = WORLD
    meets: str = WORLD
    at_servers: bool = False
    """Whether `Star` takes its place where there are parameter servers."""
    bucket_bytes: ClassVar[int] = sys.maxsize
    """The most bytes of a bucket, but for a larger parameter. Where an exchange is many messages, the link is
    idle between two of them: the exchange of another bucket uses it then."""

    def without_servers(self) -> Topology:
        """The topology that is used instead where there are no servers."""
        return self

    @property
    def on_device(self) -> bool:
        """Whether `conduct` takes values to the host by `Read` alone; see `Compressor.on_device`."""
        return False

    @property
    def encodes_first(self) -> bool:
        """Whether compressors get the whole tensor of a replica, and encode it before anything is sent.

        Only then `Compressor.shows_nonfinite` has an effect.
        """
        return False

    @property
    def takes_variable_length(self) -> bool:
        """Whether the payloads of a codec that `varies` are sent without padding to their largest size."""
        return False

    @property
    def needs_rates(self) -> bool:
        """Whether it depends on the rates of links, and has none yet."""
        return False

    @property
    def uses_rates(self) -> bool:
        """Whether it has a use for the rates of links, needed or not, and has none yet."""
        return self.needs_rates

    def for_rates(self, links: LinkRates) -> Topology:
        """This topology for these links; the same on all ranks for the same links."""
        return self

    def check_ranks(self, peers: int) -> None:
        """Raise a `ConfigError` that says what to write, if it does not work with this number of ranks."""

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on the ranks or collectives by which messages of these compressors are exchanged."""
        return type(self).__name__

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        """The collectives that exchange the first of these compressors, before a session has chosen."""
        return f"{self}"

    def options(self, compressors: Iterable[Compressor]) -> Options:
        """The topologies that a session with these compressors chooses from."""
        return Options((self,))

    def check(self, compressor: Compressor) -> None:
        """Raise a `ConfigError` if it does not work with this compressor."""
        if compressor.needs_server:
            raise ConfigError(
                f"{compressor} needs a parameter server that averages, and {self} has none: write "
                "topology=Star()"
            )

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """The names of the topology's state fields for a parameter with this compressor; see `keeps`.

        Raises:
            ConfigError: it does not work with this compressor.
        """
        return ()

    def keeps(self, numel: int, compressor: Compressor, here: AxisRank) -> Mapping[str, tuple[int, int]]:
        """The topology's state: field -> the (start, stop) that this rank keeps, of `numel` elements.

        `here`: this rank on the axis `meets`; the spans of all ranks there cover the tensor once. The names
        begin with "topology.". The tensors start as zeros, are zero in the spans of `OneShotUse.others`, are
        in units of the mean, and are in the state with the compressor's.
        """
        return {}

    def spans(self, edges: Sequence[int] | range, near: AxisRank) -> Spans:
        """Which span of a tensor each rank of the node passes to its compressor; all, where none divide it.

        `edges`: where it may be cut, rising, from 0 to its number of elements.
        """
        return ((0, edges[-1]),)

    @abstractmethod
    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Run the compressor's exchange of `x`: set the axis of its requests, answer its `ReduceEncoded`.

        The compressor and `state` are for this rank's span of `x`. Averages `ctx.nonfinite_flags` over the
        scope, and fills `ctx.finite_probe`, where they are given.
        """


_RATE_UNKNOWN = 1e11


@dataclass(frozen=True)
class LinkRates:
    """What the links between nodes carry.

    Attributes:
        matrix: bit/s from each node (row) to each node (column), while as much comes back. The diagonal is
            within a node; None where nothing is known.
        nodes: the ranks of each node.
        latency: seconds of a small message between two nodes, one way.
    """

    matrix: tuple[tuple[float | None, ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    latency: float = 0.0

    def of_nodes(self) -> tuple[float, ...]:
        """The rate of each node's link: the highest of its rates to and from another node.

        So the slow link of a node counts for that node alone.
        """
        nodes = range(len(self.matrix))
        if len(nodes) == 1:
            return (_RATE_UNKNOWN,)
        return tuple(max(min(self.between(i, j), self.between(j, i)) for j in nodes if j != i) for i in nodes)

    def of_ranks(self) -> tuple[tuple[float | None, ...], ...]:
        """From each rank to each rank: the rate of their nodes, or None within a node of unknown rate."""
        node = {rank: i for i, ranks in enumerate(self.nodes) for rank in ranks}
        every = sorted(node)
        return tuple(tuple(self.matrix[node[a]][node[b]] for b in every) for a in every)

    def between(self, i: int, j: int) -> float:
        """Bit/s from a node to a node."""
        return self.matrix[i][j] or _RATE_UNKNOWN


class ByLinks(Topology):
    """A topology that depends on the rates of links; they are measured at attach if it does not name them.

    Ranks may send different numbers of bytes in a message.
    """


def made_for(topology: Topology, links: LinkRates) -> Topology:
    """The topology for these links, if it has a use for rates and none yet; else itself."""
    return topology.for_rates(links) if topology.uses_rates else topology


class NodeTopology(Topology):
    """Combines the tensors of a node first; compressors meet between the nodes.

    Attributes:
        near: the levels inside a node that is a whole place: the ranks of a machine, and the machines.
    """

    near: tuple[int, ...]

    @abstractmethod
    def of_places(self, near: tuple[int, ...]) -> Topology:
        """This topology, for nodes that are places with these levels."""

    @property
    @abstractmethod
    def without_nodes(self) -> Topology:
        """How nodes exchange, for nodes of one rank: all replicas are then on the axis between them."""


class MixingTopology(Topology):
    """A topology whose answer differs from rank to rank, so that replicas differ; for a merge that `mixes`.

    The mean of the answers over the ranks is the mean of the inputs. As a NaN is not in every answer,
    `Context.nonfinite_flags` reports it to all ranks.
    """

    mixes: ClassVar[bool] = True


class Consistency(Protocol):
    """When a server answers."""

    @property
    def in_rounds(self) -> bool:
        """Whether it answers in rounds of all workers."""

    @property
    def bound(self) -> int | None:
        """How many steps a worker may be ahead of the slowest; None: none has to wait."""


class OuterMomentum(Protocol):
    """How a server steps by what workers have moved; see `topologies.DelayedNesterov`."""

    @property
    def lr(self) -> float:
        """Of the outer step."""

    @property
    def momentum(self) -> float:
        """From 0 to below 1."""

    @property
    def delay(self) -> int | None:
        """Pushes from one step of the momentum to the next; None: the number of workers."""


class ServerTopology(Topology):
    """A topology that uses parameter servers. These keep state by bucket, so buckets stay as first made.

    Attributes:
        consistency: when a server answers.
        pull: the compressor of answers; None: they are dense.
        optimizer: which optimizer steps: each worker's, or the server's.
        compensation, by_staleness: how the server corrects and weighs a stale push.
        outer: how the server steps by a push of what a worker has moved; None: it adds that.
    """

    takes_variable_length: ClassVar[bool] = True

    consistency: Consistency
    pull: Compressor | None = None
    optimizer: Literal["worker", "server"] = "worker"
    compensation: float = 0.0
    by_staleness: bool = False
    outer: OuterMomentum | None = None

    @property
    @abstractmethod
    def averages(self) -> bool:
        """Whether a server only averages what workers push; else it keeps the parameters."""

    @property
    @abstractmethod
    def counts_all(self) -> bool:
        """Whether the server applies every push in full, however late it comes."""

    @property
    def independent(self) -> bool:
        """Whether each replica trains without waiting for others, so that there is no collective call."""
        return not self.averages

    @property
    @abstractmethod
    def has_feedback(self) -> bool:
        """Whether answers have error feedback."""

    @abstractmethod
    def admit(self, subject: str, rounds: Rounds, merge: Merge, overlap: Overlap) -> None:
        """Raise a `ConfigError` that says what to write, if it cannot work with these parts of a strategy."""

    @abstractmethod
    def agree(self, x: Tensor) -> Generator[Request, Any, None]:
        """Requests that make independent replicas equal, as at `session.sync()`: `x` becomes their anchor."""

    @abstractmethod
    def back(self, x: Tensor) -> PayloadSpec:
        """The format in which the server sends the parameters `x` of a bucket, or their change."""


class PairTopology(ServerTopology):
    """Each rank keeps its parameters in a store, as a server with one worker would; stores average in pairs.

    They do so at any time. No server is started.

    Attributes:
        allow_lost: whether a rank that is gone is left out; else it is an error.
        global_every: in every so many-th round all ranks wait for each other, and must have taken equally
            many steps; 0: never.
    """

    in_pairs: ClassVar[bool] = True

    allow_lost: bool
    global_every: int

    def check_ranks(self, peers: int) -> None:
        self.partners(0, peers)

    @abstractmethod
    def partners(self, rank: int, peers: int) -> tuple[int, ...]:
        """The ranks that this one may ask for an average; empty for one that only answers.

        A rank that asks is never asked. Raises a `ConfigError` if the graph cannot have so many ranks.
        """

    @abstractmethod
    def partner(self, rank: int, peers: int, turn: int, seed: int, lost: Collection[int] = ()) -> int | None:
        """The rank that this one asks in its `turn`-th turn, none of the lost; None if there is none."""

    def turns(self, peers: int) -> int:
        """How many turns a round has, one after the other."""
        return 1
