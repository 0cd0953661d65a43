"""The PCIe tree of one host: from groups by distance, or from an explicit tree, to a parent for every member."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from perfmodel.config.topology import LEVELS, NodeSpec, PcieSpec
from perfmodel.errors import TopologyError
from perfmodel.topology.link import NodeKind

_NAME = re.compile(r"(numa|bridge|switch|gpu|nic)(?:0|[1-9][0-9]*)")
_KINDS = {
    "numa": NodeKind.NUMA,
    "bridge": NodeKind.HOST_BRIDGE,
    "switch": NodeKind.PCIE_SWITCH,
    "gpu": NodeKind.GPU,
    "nic": NodeKind.NIC,
}


def kind_of(name: str) -> NodeKind:
    """Kind of a node of the PCIe tree, from its name. Raises TopologyError for a name that no part can have."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise TopologyError(f"pcie.tree: found {name!r}, allowed numa<n>, bridge<n>, switch<n>, gpu<n>, nic<n>")
    return _KINDS[match[1]]


def pcie_parents(node: NodeSpec) -> dict[str, str]:
    """Parent of every GPU, NIC, switch and bridge of a host; the roots are its NUMA nodes.

    Raises:
        TopologyError: groups that overlap, a tree with a cycle or two parents, a GPU or NIC that is not in it.
    """
    if node.pcie is None:
        return {}
    members = [f"gpu{i}" for i in range(len(node.devices))] + [
        f"nic{i}" for i in range(node.nics.count if node.nics else 0)
    ]
    if node.pcie.tree is not None:
        return _explicit(node.pcie.tree, members)
    return _from_levels(_levels(node.pcie, len(node.devices), members))


def _explicit(tree: Mapping[str, Sequence[str]], members: Sequence[str]) -> dict[str, str]:
    parents: dict[str, str] = {}
    for parent, children in tree.items():
        if kind_of(parent) in (NodeKind.GPU, NodeKind.NIC):
            raise TopologyError(f"pcie.tree: {parent} has children; only numa, bridge and switch do")
        for child in children:
            kind_of(child)
            if child in parents:
                raise TopologyError(f"pcie.tree: {child} has two parents, {parents[child]} and {parent}")
            parents[child] = parent
    for start in parents:
        _check_root(start, parents)
    missing = [name for name in members if name not in parents]
    if missing:
        raise TopologyError(f"pcie.tree: {missing[0]} is not in the tree, so no other device reaches it")
    return parents


def _check_root(start: str, parents: Mapping[str, str]) -> None:
    seen, name = [start], start
    while name in parents:
        name = parents[name]
        if name in seen:
            raise TopologyError(f"pcie.tree: {' -> '.join([*seen[seen.index(name) :], name])} is a cycle")
        seen.append(name)
    if kind_of(name) is not NodeKind.NUMA:
        raise TopologyError(f"pcie.tree: {start} ends at {name}, which hangs on no numa<n>")


def _levels(pcie: PcieSpec, n_gpus: int, members: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Per level the groups, each level merged with the nearer ones and complete over the members."""
    explicit = [_equal_groups(getattr(pcie, level), n_gpus, level) for level in LEVELS]
    if not explicit[-1]:
        explicit[-1] = [tuple(members)]
    _place_nics(explicit, n_gpus, members)
    merged: list[list[tuple[str, ...]]] = []
    for level, groups in zip(LEVELS, explicit, strict=True):
        _check_disjoint(level, groups)
        below = merged[-1] if merged else []
        merged.append(_merge(level, groups, below, members))
    return merged


def _equal_groups(value: int | tuple[tuple[str, ...], ...], n_gpus: int, level: str) -> list[tuple[str, ...]]:
    if not isinstance(value, int):
        return list(value)
    if n_gpus % value:
        raise TopologyError(f"pcie.{level}: found {value}, but {n_gpus} GPUs do not split into {value} equal groups")
    size = n_gpus // value
    return [tuple(f"gpu{i}" for i in range(first, first + size)) for first in range(0, n_gpus, size)]


def _place_nics(explicit: list[list[tuple[str, ...]]], n_gpus: int, members: Sequence[str]) -> None:
    """Puts every NIC that no group names beside its GPU, in all the groups that hold that GPU."""
    named = {name for groups in explicit[:-1] for group in groups for name in group}
    nics = [name for name in members if name.startswith("nic")]
    for index, nic in enumerate(nics):
        gpu = f"gpu{index * n_gpus // len(nics)}"
        for depth, groups in enumerate(explicit):
            at_home = [nic in group for group in groups]
            if any(at_home) or (nic in named and depth < len(explicit) - 1):
                continue
            owner = _owner(nic, gpu, explicit[:depth]) if nic in named else gpu
            explicit[depth] = [(*group, nic) if owner in group else group for group in groups]


def _owner(nic: str, default: str, nearer: Sequence[Sequence[tuple[str, ...]]]) -> str:
    """A GPU that shares a nearer group with the NIC; the default where there is none."""
    for groups in nearer:
        for group in groups:
            if nic in group:
                return next((name for name in group if name.startswith("gpu")), default)
    return default


def _check_disjoint(level: str, groups: Iterable[Sequence[str]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group:
            if name in seen:
                raise TopologyError(f"pcie.{level}: {name} is named twice")
            seen.add(name)


def _merge(
    level: str, groups: Sequence[tuple[str, ...]], below: Sequence[tuple[str, ...]], members: Sequence[str]
) -> list[tuple[str, ...]]:
    home = {name: index for index, group in enumerate(groups) for name in group}
    merged = [list(group) for group in groups]
    for lower in below:
        homes = {home[name] for name in lower if name in home}
        if len(homes) > 1:
            raise TopologyError(
                f"pcie.{level}: {' and '.join(lower)} share a nearer group but stand in different groups here"
            )
        if homes:
            target = homes.pop()
            merged[target] += [name for name in lower if name not in home]
        else:
            merged.append(list(lower))
        home.update({name: home.get(name, len(merged) - 1) for name in lower})
    merged += [[name] for name in members if name not in {name for group in merged for name in group}]
    order = {name: index for index, name in enumerate(members)}
    return sorted((tuple(sorted(group, key=order.__getitem__)) for group in merged), key=lambda group: order[group[0]])


def _from_levels(levels: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, str]:
    """A parent for every member: switch, switch above it where several share one, host bridge, NUMA node."""
    switches, trees, bridges, sockets = levels
    parents: dict[str, str] = {}
    names = _Names()
    for socket in sockets:
        numa = names.next("numa")
        for bridge_group in _inside(bridges, socket):
            bridge = names.next("bridge")
            parents[bridge] = numa
            for tree in _inside(trees, bridge_group):
                _hang_tree(tree, _inside(switches, tree), bridge, parents, names)
    return parents


def _hang_tree(
    tree: Sequence[str], switches: Sequence[tuple[str, ...]], bridge: str, parents: dict[str, str], names: _Names
) -> None:
    top = bridge
    if len(switches) > 1:
        top = names.next("switch")
        parents[top] = bridge
    for group in switches:
        # A lone device hangs on the root port itself, unless it is PXB to others: then it has a switch of its own.
        above = top
        if len(group) > 1 or len(tree) > 1:
            above = names.next("switch")
            parents[above] = top
        parents.update(dict.fromkeys(group, above))


def _inside(groups: Sequence[tuple[str, ...]], outer: Sequence[str]) -> list[tuple[str, ...]]:
    return [group for group in groups if group[0] in outer]


class _Names:
    """Counts the parts of each kind in the order they are met."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def next(self, prefix: str) -> str:
        index = self._counts.get(prefix, 0)
        self._counts[prefix] = index + 1
        return f"{prefix}{index}"
