"""Names of communication kernels, as all versions of NCCL and RCCL spell them, and of collectives, as PyTorch does.

- up to 2.7: `ncclAllReduceRingLLKernel_sum_f32(ncclColl)`
- 2.8 to 2.18: `ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, ...)`
- from 2.19: `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`; from 2.27 also `ncclSymDevKernel_...` and `ncclSymkDevKernel_...`
- RCCL: `ncclDevKernel_Generic_4(...)`, `rcclGenericKernel...`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Our names of collectives by the letters of every spelling above and of PyTorch's ("allreduce", "_allgather_base", ...).
_OPS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgatherv": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterv": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "allreducecoalesced": "all_reduce",
    "allreducesparse": "all_reduce",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all_v",
    "sendrecv": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "sendrecvanysource": "send_recv",
    "recvanysource": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "alltoallsingle": "all_to_all",
}
UNKNOWN = "unknown"
_ALGORITHMS = ("RING", "TREE", "COLLNET_DIRECT", "COLLNET_CHAIN", "COLLNET", "NVLS_TREE", "NVLS", "PAT", "ST", "RSXLD")
_PROTOCOLS = ("LL128", "SIMPLE", "LL")
_OLD = re.compile(r"nccl(?P<op>[A-Z][A-Za-z]*?)(?P<algorithm>Ring|Tree|CollNet)(?P<protocol>LL128|LL|Simple)?Kernel")
_WORDS = "AllReduce|AllGatherV|AllGather|ReduceScatter|Broadcast|SendRecv|AllToAllPivot|AllToAll|Reduce|Generic"
_OP_WORD = re.compile(_WORDS, re.IGNORECASE)
_BYTES: Mapping[str, int] = {
    "double": 8, "float": 4, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "long": 8, "long int": 8, "int": 4,
    "short": 2, "short int": 2, "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "bool": 1, "int64": 8, "int32": 4,
    "float32": 4, "float16": 2, "float64": 8, "int8": 1, "uint8": 1, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "complexfloat": 8, "complexdouble": 16, "c10::complex<float>": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelName:
    """What a communication kernel's name says; `op` is `unknown` for the generic kernels, empty texts where not said."""

    op: str
    algorithm: str = ""
    protocol: str = ""


def parse_kernel_name(name: str) -> KernelName:
    """Collective, algorithm and protocol from a kernel's name.

    >>> parse_kernel_name("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)")
    KernelName(op='all_reduce', algorithm='ring', protocol='ll')
    >>> parse_kernel_name("ncclAllReduceRingLLKernel_sum_f32(ncclColl)")
    KernelName(op='all_reduce', algorithm='ring', protocol='ll')
    """
    head = name.split("(", 1)[0]
    old = _OLD.match(head)
    if old:
        protocol = old["protocol"] or "Simple"
        return KernelName(op=collective_op(old["op"]), algorithm=old["algorithm"].lower(), protocol=protocol.lower())
    word = _OP_WORD.search(head)
    tokens = head.upper()
    return KernelName(
        op=collective_op(word[0]) if word else UNKNOWN,
        algorithm=_token(tokens, _ALGORITHMS),
        protocol=_token(tokens, _PROTOCOLS),
    )


def _token(text: str, names: tuple[str, ...]) -> str:
    return next((name.lower() for name in names if re.search(rf"(?:^|_){name}(?:_|$)", text)), "")


def collective_op(name: str) -> str:
    """Our name of a collective that PyTorch, NCCL or gloo names; `unknown` if none is known by it.

    >>> collective_op("_allgather_base"), collective_op("nccl:all_to_all"), collective_op("c10d::alltoall_base_")
    ('all_gather', 'all_to_all', 'all_to_all')
    """
    plain = re.sub(r"[^a-z0-9]", "", name.rpartition(":")[2].casefold())
    return _OPS.get(plain.removesuffix("pivot"), UNKNOWN)


def itemsize_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype as profilers spell it (`Float`, `c10::Half`, `long int`); 0 if it is not known.

    >>> itemsize_bytes("Float"), itemsize_bytes("c10::BFloat16"), itemsize_bytes("odd")
    (4, 2, 0)
    """
    return _BYTES.get(dtype.strip().casefold(), 0)
