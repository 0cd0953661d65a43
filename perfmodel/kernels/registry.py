"""The two registries of kernel pricing: rules (op -> kernel calls) and families (kernel calls x device -> estimates).

A rule says *what* a device runs for an op and how much work that is; it knows no device. A family says how long its calls
take on a device, for many calls at once (numpy over the calls). Both are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perfmodel.db.device import Device
from perfmodel.estimate import Estimate, Work
from perfmodel.graph import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One kernel that a device runs for an op.

    `features` are the numbers the family's law reads (`m`, `n`, `k`, `batch`, ...; see each family). `dtype` is that of the
    arithmetic's inputs; `pipe` names the entry of `Device.peak_flops_per_s` that bounds its FLOPs.
    """

    family: str
    work: Work
    dtype: str = "float32"
    pipe: str = "fp32"
    features: Mapping[str, float] = field(default_factory=dict)


Rule = Callable[[Op], tuple[KernelCall, ...]]
Family = Callable[[Sequence[KernelCall], Device], list[Estimate]]

RULES: dict[str, Rule] = {}
FAMILIES: dict[str, Family] = {}


def kernel_rule(*op_names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for the ops named (`aten.mm`). Raises RuntimeError if one already has a rule."""

    def register(rule: Rule) -> Rule:
        for name in op_names:
            key = name.strip()
            if key in RULES:
                raise RuntimeError(f"{key} has two kernel rules")
            RULES[key] = rule
        return rule

    return register


def kernel_family(name: str) -> Callable[[Family], Family]:
    """Registers the law of the family `name`. Raises RuntimeError if it already has one."""

    def register(family: Family) -> Family:
        if name in FAMILIES:
            raise RuntimeError(f"family {name} has two laws")
        FAMILIES[name] = family
        return family

    return register
