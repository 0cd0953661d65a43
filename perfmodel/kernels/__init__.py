"""What a device runs for an op, and how long that takes. Pure: no clock, no files, no torch."""

from perfmodel.kernels.host import host_cost_s
from perfmodel.kernels.pricing import calls_of, has_rule, kind_of, kinds_of, price, price_calls, registered_rules, work
from perfmodel.kernels.registry import KernelCall, kernel_family, kernel_rule
from perfmodel.kernels.roofline import roofline

__all__ = [
    "KernelCall",
    "calls_of",
    "has_rule",
    "host_cost_s",
    "kernel_family",
    "kernel_rule",
    "kind_of",
    "kinds_of",
    "price",
    "price_calls",
    "registered_rules",
    "roofline",
    "work",
]
