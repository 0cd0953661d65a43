"""TopologySpec: a machine as people write it in `configs/topologies/*.yaml`.

A node is one host. Inside it the PCIe tree is given by what `nvidia-smi topo -m` can tell apart, from near to far:
members of one `switches` group are PIX to each other, of one `switch_trees` group PXB, of one `host_bridges` group PHB,
of one `sockets` group NODE, the rest SYS. A group holds GPU numbers, or names such as `gpu3` and `nic0`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import BytesPerS, PositiveBytes, Seconds
from perfmodel.errors import ConfigError

LEVELS = ("switches", "switch_trees", "host_bridges", "sockets")
MAX_GPUS_PER_NODE = 1024
MAX_NODES = 65536

P2pLevel = Literal["nvl", "pix", "pxb", "phb", "node", "sys"]
SocketKind = Literal["qpi", "upi", "upi2", "upi3", "xgmi2", "xgmi3", "xgmi4"]
NicKind = Literal[
    "infiniband_edr", "infiniband_hdr", "infiniband_ndr", "infiniband_xdr", "infiniband", "roce", "tcp", "unknown"
]

_MEMBER = re.compile(r"(gpu|nic)(0|[1-9][0-9]{0,4})")


def _member(value: Any) -> str:
    """`3` and `gpu3` are GPU 3, `nic0` is NIC 0."""
    name = f"gpu{value}" if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(name, str) or _MEMBER.fullmatch(name) is None:
        raise ValueError(f"found {value!r}, allowed a GPU number or a name such as gpu3 or nic0")
    return name


def _env_text(value: Any) -> str:
    """NCCL variables are text; YAML makes numbers of some of them."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"found {value!r}, allowed text or a whole number")
    return str(value)


def _groups(value: Any) -> Any:
    """A number of equal groups of GPUs, or the groups themselves."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ValueError(f"found {value}, allowed at least 1 group")
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(group, list | tuple) and group for group in value):
        raise ValueError(
            f"found {value!r}, allowed a number of equal groups or lists such as [[0, 1, nic0], [2, 3, nic1]]"
        )
    return tuple(tuple(_member(name) for name in group) for group in value)


def _gpu_list(value: Any) -> Any:
    """One kind of GPU may be written without a list."""
    return value if value is None or isinstance(value, list | tuple) else (value,)


Groups = Annotated[int | tuple[tuple[str, ...], ...], BeforeValidator(_groups)]
EnvName = Annotated[str, Field(pattern="^[A-Z][A-Z0-9_]*$")]
EnvText = Annotated[str, BeforeValidator(_env_text)]
Positive = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0, lt=MAX_GPUS_PER_NODE)]


class GpuSpec(Spec):
    """`count` GPUs of one device model (a name in `kernels_db/`)."""

    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] = 1
    device: Annotated[str, Field(min_length=1)]


Times = Annotated[float, Field(gt=0.0, le=100.0)]


class PaceSpec(Spec):
    """How many times longer parts of a CPU take now than when it was calibrated (`db.device.Pace`); 1 is as then.

    `perfmodel validate --live` measures and prints them.
    """

    compute: Times = 1.0
    memory: Times = 1.0
    lookups: Times = 1.0
    host: Times = 1.0


class CpuSpec(Spec):
    """`ranks` processes that compute on the host's CPU at some `pace`, speaking gloo over the loopback interface."""

    ranks: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] = 1
    device: Annotated[str, Field(min_length=1)] = "cpu"
    pace: PaceSpec = PaceSpec()
    loopback_bandwidth: BytesPerS
    loopback_latency: Seconds


class NvlinkSpec(Spec):
    """NVLink of one node: one of `switch` (every link goes to NVSwitches), `mesh` (n links to each peer) or `pairs`.

    `pairs` holds [gpu, gpu, links]. `link_bandwidth` and `delivered_bandwidth` (per link and direction) replace the
    generation's own. `nodes_per_domain` > 1: the switches join that many hosts (NVL72 racks).
    """

    generation: Annotated[int, Field(ge=1, le=5)]
    links_per_gpu: Annotated[int, Field(ge=1, le=64)] | None = None
    switch: bool = False
    mesh: Positive | None = None
    pairs: Annotated[
        tuple[Annotated[tuple[Index, Index, Positive], Field(strict=False)], ...], Field(strict=False)
    ] = ()
    link_bandwidth: BytesPerS | None = None
    delivered_bandwidth: BytesPerS | None = None
    latency: Seconds | None = None
    nodes_per_domain: Positive = 1

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.switch + (self.mesh is not None) + bool(self.pairs) != 1:
            raise ValueError(
                "allowed exactly one of `switch: true`, `mesh: <links to each peer>`, `pairs: [[0, 1, 4], ...]`"
            )
        if self.switch and self.links_per_gpu is None:
            raise ValueError("`switch: true` needs `links_per_gpu`")
        if self.nodes_per_domain > 1 and not self.switch:
            raise ValueError("`nodes_per_domain` needs `switch: true`: only NVSwitches join hosts")
        seen: set[frozenset[int]] = set()
        for first, second, _ in self.pairs:
            if first == second or frozenset((first, second)) in seen:
                raise ValueError(f"pair [{first}, {second}] joins a GPU to itself or is given twice")
            seen.add(frozenset((first, second)))
        return self


class PortSpec(Spec):
    """The PCIe link from one member up to its parent, where it differs from the node's."""

    generation: Annotated[int, Field(ge=3, le=6)] | None = None
    lanes: Literal[1, 2, 4, 8, 16] | None = None
    bandwidth: BytesPerS | None = None


class MeasuredSpec(Spec):
    """A measured bandwidth (one direction, nothing else running) of GPU pairs, or of every pair of one path kind."""

    pairs: tuple[tuple[Index, Index], ...] = ()
    path: Literal["nvlink", "nvswitch", "nvlink_relay", "pix", "pxb", "phb", "node", "sys", "staged"] | None = None
    bandwidth: BytesPerS
    latency: Seconds | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if bool(self.pairs) == (self.path is not None):
            raise ValueError("allowed exactly one of `pairs: [[0, 1], ...]` and `path: <kind>`")
        return self


class PcieSpec(Spec):
    """The PCIe tree of a node: link speed and who shares what.

    Each level is a list of groups or the number of equal groups of GPUs. `tree` (parent: [children]) replaces the
    levels for boxes they cannot say: names start with numa, bridge, switch, gpu or nic. `hidden`: a virtual machine
    shows a flat tree; pairs then need `measured`.
    """

    generation: Annotated[int, Field(ge=3, le=6)]
    lanes: Literal[1, 2, 4, 8, 16] = 16
    uplink_lanes: Literal[1, 2, 4, 8, 16] | None = None
    switches: Groups = ()
    switch_trees: Groups = ()
    host_bridges: Groups = ()
    sockets: Groups = ()
    tree: dict[str, tuple[str, ...]] | None = None
    ports: dict[str, PortSpec] = Field(default_factory=dict)
    inter_socket: SocketKind = "upi"
    inter_socket_bandwidth: BytesPerS | None = None
    host_memory_bandwidth: BytesPerS | None = None
    hidden: bool = False

    @model_validator(mode="after")
    def _tree_or_levels(self) -> Self:
        given = [level for level in LEVELS if getattr(self, level)]
        if self.tree is not None and given:
            raise ValueError(f"`tree` replaces `{given[0]}`: give one of them")
        return self


class NicSpec(Spec):
    """`count` network cards; NIC i sits by GPU i * n_gpus // count unless a PCIe group names it.

    `storage` lists those that training does not use, `names` what the system calls them. Kind `unknown` (a matrix does not
    say) stands until someone fills it in: such a card carries nothing.
    """

    count: Annotated[int, Field(ge=1, le=MAX_GPUS_PER_NODE)] = 1
    kind: NicKind
    bandwidth: BytesPerS | None = None
    delivered_bandwidth: BytesPerS | None = None
    latency: Seconds | None = None
    storage: tuple[Index, ...] = ()
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_rate(self) -> Self:
        if self.names and len(self.names) != self.count:
            raise ValueError(f"names: found {len(self.names)}, allowed {self.count}, one for each NIC")
        if self.bandwidth is None and "_" not in self.kind and self.kind != "unknown":
            raise ValueError(f"kind `{self.kind}` comes in many speeds: give `bandwidth`, such as 100 Gbit/s")
        wrong = [index for index in self.storage if index >= self.count]
        if wrong:
            raise ValueError(f"storage NIC {wrong[0]} does not exist: count is {self.count}")
        return self


class P2pSpec(Spec):
    """When GPUs write to each other over PCIe: up to `level` apart (as NCCL_P2P_LEVEL), unless disabled or unsupported.

    Without `level`, as NCCL decides: across sockets on AMD (`inter_socket: xgmi*`), within one otherwise.
    """

    level: P2pLevel | None = None
    disabled: bool = False
    unsupported: tuple[tuple[Index, Index], ...] = ()


class NodeSpec(Spec):
    """One host: its GPUs (or CPU ranks) and what joins them; bytes of its memory and of its SSDs, if known."""

    gpus: Annotated[tuple[GpuSpec, ...], BeforeValidator(_gpu_list)] = ()
    cpus: CpuSpec | None = None
    nvlink: NvlinkSpec | None = None
    pcie: PcieSpec | None = None
    nics: NicSpec | None = None
    p2p: P2pSpec = P2pSpec()
    measured: tuple[MeasuredSpec, ...] = ()
    memory: PositiveBytes | None = None
    ssd: PositiveBytes | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank of the node, in order."""
        if self.cpus is not None:
            return (self.cpus.device,) * self.cpus.ranks
        return tuple(group.device for group in self.gpus for _ in range(group.count))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.gpus) == (self.cpus is not None):
            raise ValueError("a node has `gpus` or `cpus`, exactly one of them")
        if self.cpus is not None and (self.nvlink or self.pcie):
            raise ValueError("`nvlink` and `pcie` join GPUs; a node of `cpus` has neither")
        if self.nics is not None and self.gpus and self.pcie is None:
            raise ValueError("`nics` sit on PCIe: give `pcie`")
        self._check_numbers()
        return self

    def _check_numbers(self) -> None:
        n_gpus, n_nics = len(self.devices), self.nics.count if self.nics else 0
        pairs = [*self.p2p.unsupported, *(pair for m in self.measured for pair in m.pairs)]
        pairs += [(a, b) for a, b, _ in self.nvlink.pairs] if self.nvlink else []
        for pair in pairs:
            if max(pair) >= n_gpus:
                raise ValueError(f"pair {list(pair)} names GPU {max(pair)}: the node has GPUs 0 to {n_gpus - 1}")
        for name in self._members():
            match = _MEMBER.fullmatch(name)
            limit = {"gpu": n_gpus, "nic": n_nics}.get(match[1], 0) if match else None
            if match and limit is not None and int(match[2]) >= limit:
                raise ValueError(f"pcie names {name}: the node has {n_gpus} GPUs and {n_nics} NICs")

    def _members(self) -> list[str]:
        if self.pcie is None:
            return []
        levels = [getattr(self.pcie, level) for level in LEVELS]
        named = [name for groups in levels if isinstance(groups, tuple) for group in groups for name in group]
        return named + [name for children in (self.pcie.tree or {}).values() for name in children]


class GroupSpec(Spec):
    """`nodes` equal hosts, in a machine whose hosts differ."""

    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    node: NodeSpec


class NetworkSpec(Spec):
    """What joins the hosts: `switch` (all NICs on one) or `fat_tree` (leaves under a spine).

    `rails`: NIC i of every host of a block of `nodes_per_leaf` shares leaf i, so equal NICs meet without the spine.
    `oversubscription`: downlink over uplink bandwidth of a leaf.
    """

    kind: Literal["switch", "fat_tree"] = "fat_tree"
    rails: bool = False
    oversubscription: Annotated[float, Field(ge=1.0, le=64.0)] = 1.0
    nodes_per_leaf: Positive = 32
    switch_latency: Seconds | None = None


class TopologySpec(Spec):
    """A machine: `nodes` equal hosts of one `node`, or `groups` of them, joined by `network`.

    `fabric` names the collective fit to use (derived when absent); `env` holds NCCL_* variables, which change
    choices, and glibc's MALLOC_* of CPU processes (`kernels.cpu_heap.keeps_pages`).
    """

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    node: NodeSpec | None = None
    groups: tuple[GroupSpec, ...] = ()
    network: NetworkSpec | None = None
    fabric: str | None = None
    env: dict[EnvName, EnvText] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.node is None) != bool(self.groups):
            raise ValueError("allowed exactly one of `node` and `groups`")
        if self.groups and self.nodes != 1:
            raise ValueError("`nodes` belongs to `node`; each of `groups` has its own")
        return self

    @property
    def node_groups(self) -> tuple[tuple[int, NodeSpec], ...]:
        """(number of hosts, their spec), whichever form the file has."""
        if self.node is not None:
            return ((self.nodes, self.node),)
        return tuple((group.nodes, group.node) for group in self.groups)

    @property
    def n_nodes(self) -> int:
        """Number of hosts."""
        return sum(count for count, _ in self.node_groups)

    def with_nodes(self, n_nodes: int) -> TopologySpec:
        """The same machine with another number of equal hosts. Raises ConfigError where hosts differ, or n_nodes < 1."""
        if self.node is None:
            raise ConfigError(f"{self.name} has {len(self.groups)} kinds of nodes: their number cannot be overridden")
        if not 1 <= n_nodes <= MAX_NODES:
            raise ConfigError(f"nodes: found {n_nodes}, allowed 1 to {MAX_NODES}")
        return self.model_copy(update={"nodes": n_nodes})
