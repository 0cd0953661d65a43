"""From ops to estimates: find each op's kernel calls, then let every family price all its calls at once.

Rules are pure, so their results are remembered: by identity of the op (a graph is priced many times) and by its
signature (a model repeats its layers). A law then sees each distinct call once.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Work
from perfmodel.graph import Op
from perfmodel.kernels.registry import FAMILIES, RULES, Family, KernelCall, Rule
from perfmodel.kernels.roofline import roofline
from perfmodel.kernels.unmodelled import unmodelled

MAX_REMEMBERED_DEVICES = 16
MAX_REMEMBERED_CALLS = 200_000  # of one family on one device
MAX_REMEMBERED_OPS = 1_000_000  # about 200 MB; beyond it the memory of rule results starts anew

TF32, WITHOUT_TF32 = "tf32_tensor", "fp32"  # pipes; NVIDIA A100 white paper: TF32 came with Ampere's tensor cores

SPARSE_ARGUMENT = ".values"  # a sparse tensor argument is given as two tensors, `<name>.indices` and `<name>.values`
EMBEDDING_BAG_BACKWARD = "aten._embedding_bag_backward"

Calls = tuple[KernelCall, ...]


@cache
def registered_rules() -> Mapping[str, Rule]:
    """Every kernel rule by op name, after importing all modules of this package once."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
    return RULES


def rule_key(op: Op) -> str:
    """Key of the rule for `op`: its name, with `@sparse` behind it if an argument is a sparse tensor.

    The backward of an embedding bag is recorded whole, above its dense and its sparse kernel; here it becomes one of them.
    """
    if op.name == EMBEDDING_BAG_BACKWARD:
        return f"aten._embedding_bag_{'sparse' if op.attrs.get('sparse') else 'dense'}_backward"
    is_sparse = any(name.endswith(SPARSE_ARGUMENT) for name in op.input_names)
    return f"{op.name}@sparse" if is_sparse else op.name


def has_rule(op: Op) -> bool:
    """True if some module here says what a device runs for `op`; otherwise it is priced as unmodelled."""
    return rule_key(op) in registered_rules()


class _Memory:
    """Kernel calls of the ops seen so far. Holds each op, so that an identity is never reused while it is a key."""

    def __init__(self) -> None:
        self.by_identity: dict[int, tuple[Op, int, Calls]] = {}
        self.by_parts: dict[object, tuple[Op, int, Calls]] = {}
        self.by_signature: dict[object, tuple[int, Calls]] = {}
        self.kinds = count()  # never used again, even when the memory starts anew

    def of(self, op: Op) -> tuple[Op, int, Calls]:
        """The op, the number of its signature and its calls."""
        known = self.by_identity.get(id(op))
        if known is not None:
            return known
        if len(self.by_identity) >= MAX_REMEMBERED_OPS:
            self.by_identity.clear()
            self.by_parts.clear()
            self.by_signature.clear()
        parts = _parts(op)
        alike = self.by_parts.get(parts)
        if alike is None:
            alike = self.by_parts[parts] = (op, *self._same(op))
        found = self.by_identity[id(op)] = (op, alike[1], alike[2])
        return found

    def _same(self, op: Op) -> tuple[int, Calls]:
        key = signature(op)
        same = self.by_signature.get(key)
        if same is None:
            same = next(self.kinds), registered_rules().get(rule_key(op), unmodelled)(op)
            self.by_signature[key] = same
        return same

    def calls(self, op: Op) -> Calls:
        return self.of(op)[2]


_MEMORY = _Memory()


def _parts(op: Op) -> tuple[object, ...]:
    """What `signature` reads, its values by identity: an op renumbered in a part of its graph has the same."""
    values = id(op.inputs), id(op.outputs), id(op.input_names), id(op.attrs)
    return (*values, op.name, op.overload, op.phase, op.recompute, op.stream)


def signature(op: Op) -> tuple[object, ...]:
    """What a rule may look at: equal signatures have equal kernel calls. Ids and module paths are left out."""
    first_seen: dict[int, int] = {}
    specs = (*op.inputs, *op.outputs)
    aliases = tuple([first_seen.setdefault(spec.storage, len(first_seen)) for spec in specs])
    return (
        op.name,
        op.overload,
        op.input_names,
        tuple([(spec.shape, spec.dtype, spec.strides) for spec in specs]),
        aliases,
        repr(sorted(op.attrs.items())),
        op.phase,
        op.recompute,
        op.stream,
    )


def calls_of(op: Op) -> Calls:
    """The kernels that a device runs for `op`; () for a view, one call of family `unmodelled` without a rule."""
    return _MEMORY.calls(op)


def kind_of(op: Op) -> int:
    """A number that ops have in common whose signatures are equal, and which no others ever have."""
    return _MEMORY.of(op)[1]


def kinds_of(ops: Iterable[Op]) -> NDArray[np.int64]:
    """A number of each op that ops have in common whose kernels and whose waits of the host are the same."""
    find = _MEMORY.of
    return np.array([2 * find(op)[1] + op.host_sync for op in ops], dtype=np.int64)


def work(op: Op) -> Work:
    """FLOPs and bytes of all kernels of `op`."""
    return sum((call.work for call in calls_of(op)), Work())


def price(ops: Iterable[Op], device: Device) -> list[tuple[Estimate, ...]]:
    """Estimates of the kernels of each op on `device`, in the order of `calls_of`; () for an op without kernels.

    Each family prices all its calls at once. A family without a law is priced by the datasheet roofline. On a CPU an op is
    one whole call, priced in its place among `ops` (see `cpu_law`): one estimate an op.
    """
    if device.kind == "cpu":
        from perfmodel.kernels.cpu_law import price_step  # it asks this module for calls

        return price_step(list(ops), device)
    recall = _MEMORY.calls
    per_op = [recall(op) for op in ops]
    distinct = {id(calls): calls for calls in per_op}
    priced = _price_calls(distinct.values(), device)
    results = {key: tuple(priced[id(call)] for call in calls) for key, calls in distinct.items()}
    return [results[id(calls)] for calls in per_op]


def price_calls(calls: Sequence[KernelCall], device: Device) -> list[Estimate]:
    """The estimate of each call on `device` (for callers that make calls themselves, such as embedding shards)."""
    registered_rules()
    priced = _price_calls([tuple(calls)], device)
    return [priced[id(call)] for call in calls]


def _has_own_law(family: str, device: Device) -> bool:
    """False if the device's fit of the family is of whole operators on a CPU, which the family's law cannot read."""
    fit = device.fits.get(family)
    return fit is None or not fit.law.startswith("cpu/")


def price_apart(groups: Sequence[Calls], device: Device) -> list[tuple[Estimate, ...]]:
    """Estimates of groups of calls, each call by its family's law."""
    priced = _price_calls(groups, device)
    return [tuple(priced[id(call)] for call in calls) for calls in groups]


def _price_calls(groups: Iterable[Calls], device: Device) -> dict[int, Estimate]:
    """Prices every distinct call; the result is keyed by the identity of the call."""
    by_family: dict[str, dict[int, KernelCall]] = {}
    for calls in groups:
        for call in calls:
            by_family.setdefault(call.family, {})[id(call)] = call
    priced: dict[int, Estimate] = {}
    for family, members in by_family.items():
        priced |= _ANSWERS.of(device, family, members)
    return priced


class _Answers:
    """Estimates given so far, for the devices asked about last: a plan or a batch of the same model asks most of them again.

    Holds each device, law and call, so that an identity is never reused while it is a key.
    """

    def __init__(self) -> None:
        self.by_device: dict[int, tuple[Device, dict[str, _FamilyAnswers]]] = {}

    def of(self, device: Device, family: str, members: Mapping[int, KernelCall]) -> dict[int, Estimate]:
        """The estimate of each call, by its identity."""
        _, families = self.by_device.pop(id(device), (device, {}))
        self.by_device[id(device)] = (device, families)  # last asked, last in order
        if len(self.by_device) > MAX_REMEMBERED_DEVICES:
            del self.by_device[next(iter(self.by_device))]
        law = FAMILIES.get(family, roofline) if _has_own_law(family, device) else roofline
        known = families.get(family)
        if known is None or known.law is not law or len(known.estimates) > MAX_REMEMBERED_CALLS:
            known = families[family] = _FamilyAnswers(law)
        return known.of(device, family, members)


def _as_run(call: KernelCall, device: Device) -> KernelCall:
    """The call as `device` runs it: permission to use TF32 changes nothing where there are no TF32 units (before Ampere)."""
    if call.pipe == TF32 and TF32 not in device.peak_flops_per_s:
        return replace(call, pipe=WITHOUT_TF32)
    return call


class _FamilyAnswers:
    """Estimates by one law on one device."""

    def __init__(self, law: Family) -> None:
        self.law = law
        self.estimates: dict[int, tuple[KernelCall, Estimate]] = {}

    def of(self, device: Device, family: str, members: Mapping[int, KernelCall]) -> dict[int, Estimate]:
        """The estimate of each call, by its identity; calls not seen before are priced together."""
        estimates = self.estimates
        new = [call for key, call in members.items() if key not in estimates]
        if new:
            found = self.law([_as_run(call, device) for call in new], device)
            if len(found) != len(new):
                raise RuntimeError(f"family {family} gave {len(found)} estimates for {len(new)} calls")
            estimates.update((id(call), (call, estimate)) for call, estimate in zip(new, found, strict=True))
        return {key: estimates[key][1] for key in members}


_ANSWERS = _Answers()
