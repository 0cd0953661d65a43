"""CollectiveCall and CollectiveEstimate: what is asked of a group of ranks, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.errors import ConfigError, suggest
from perfmodel.estimate import Estimate, Source
from perfmodel.topology import Topology

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
    "gather",
    "scatter",
    "barrier",
)
SendBytes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective of a group.

    Attributes:
        op: one of OPS.
        bytes: size by the nccl-tests convention: all_reduce, broadcast, reduce, send_recv the buffer; all_gather and gather
            the total received; reduce_scatter and scatter the total sent; all_to_all(_v) the (largest) send buffer of one
            rank.
        ranks: members, in group order.
        dtype: element type; reductions of narrow types cost more per byte.
        send_bytes: of all_to_all_v, `send_bytes[i][j]` is what the i-th member sends to the j-th.
    """

    op: str
    bytes: int
    ranks: tuple[int, ...]
    dtype: str = "float32"
    send_bytes: SendBytes | None = None

    @property
    def n_ranks(self) -> int:
        """Size of the group."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEstimate:
    """How long a collective takes once its last rank has arrived, and why.

    Attributes:
        estimate: device time with its range and source.
        algorithm: ring, tree, nvls, nvls_tree, direct, pairwise, halving_doubling or none (a group of one).
        protocol: ll, ll128, simple, or none (transports without them).
        n_channels: rings, trees or peer channels that move bytes at once.
        latency_s, bandwidth_s: parts of the time that do not and that do grow with the bytes.
        bottleneck: name of the link that sets the bandwidth part; empty for a group of one.
        algbw_bytes_per_s, busbw_bytes_per_s: as nccl-tests defines them; 0 for a barrier.
        issue_s: what the thread of a CPU rank spends on asking for it, where that was measured; else 0.
        busy_frac: processor time of a CPU rank's transport over the duration, alone on the host; 0 where it takes none.
    """

    estimate: Estimate
    algorithm: str
    protocol: str
    n_channels: int
    latency_s: float
    bandwidth_s: float
    bottleneck: str
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    issue_s: float = 0.0
    busy_frac: float = 0.0

    @property
    def time_s(self) -> float:
        """Predicted duration (s)."""
        return self.estimate.time_s

    @property
    def low_s(self) -> float:
        """Low end of the range (s)."""
        return self.estimate.low_s

    @property
    def high_s(self) -> float:
        """High end of the range (s)."""
        return self.estimate.high_s

    @property
    def source(self) -> Source:
        """Where the price came from."""
        return self.estimate.source


def bus_factor(op: str, n_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth (nccl-tests doc/PERFORMANCE.md).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.75, 0.75, 1.0)
    """
    if n_ranks < 2:
        return 1.0
    share = (n_ranks - 1) / n_ranks
    factors: Mapping[str, float] = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0}
    return factors.get(op, share)


def check_call(call: CollectiveCall, topology: Topology) -> None:
    """Raises ConfigError or TopologyError for a call that no library would take."""
    if call.op not in OPS:
        raise ConfigError(f"collective: found {call.op!r}, allowed {', '.join(OPS)}{suggest(call.op, OPS)}")
    if call.bytes < 0:
        raise ConfigError(f"{call.op}: found {call.bytes} bytes, allowed 0 or more")
    topology.check_group(call.ranks)
    if (call.send_bytes is not None) != (call.op == "all_to_all_v"):
        raise ConfigError(f"{call.op}: send_bytes belongs to all_to_all_v, which needs it")
    if call.send_bytes is not None:
        rows = {id(row): row for row in call.send_bytes}.values()  # of thousands of ranks many send alike: one object
        square = len(call.send_bytes) == call.n_ranks and all(len(row) == call.n_ranks for row in rows)
        if not square or min(min(row) for row in rows) < 0:
            raise ConfigError(f"send_bytes: needs {call.n_ranks} rows of {call.n_ranks} sizes, each 0 or more")
