"""Measured collectives in the public formats, as rows: which machine, which collective, how long.

The machine of a row is a shipped topology (or a copy of one with other numbers of nodes and NICs), so that scoring runs the
whole path from topology to price. Formats are known by their columns; sources and licences stand in the data's PROVENANCE.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from perfmodel.errors import ConfigError
from perfmodel.units import GIGA, MS_PER_S, US_PER_S
from perfmodel.validate.kernel_rows import is_heldout
from perfmodel.validate.posted_machines import ROCE_100, SOCKET_25, Machine, posted_machine

GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured collective. `system` names the machine in tables, `version` the library.

    `added_s` is what the measurement holds beside the collective's kernel: host time, copies.
    """

    system: str
    machine: Machine
    op: str
    bytes: int
    n_ranks: int
    dtype: str
    version: str
    measured_s: float
    added_s: float = 0.0

    @property
    def key(self) -> str:
        """Equal for repeats, element types and library versions of one case."""
        return f"{self.system}/{self.op}/{self.n_ranks}/{self.bytes}"


EDGE_BYTES = 1 << 28
# Vidur's boxes whose rows stand with an aiconfigurator system in a fit.
_VIDUR_SYSTEMS: Mapping[str, str] = {"vidur_a100_dgx": "a100_sxm", "vidur_h100_dgx": "h100_sxm"}


def is_heldout_collective(key: str) -> bool:
    """Whether no shipped fit has used a case: a fixed share, by hash, the same on every machine and in every release.

    Sizes from EDGE_BYTES on are always used: beyond the last one a law extrapolates.
    """
    system, _, rest = key.partition("/")
    if int(key.rpartition("/")[2]) >= EDGE_BYTES:
        return False
    return is_heldout(f"collective/{_VIDUR_SYSTEMS.get(system, system)}/{rest}")


# aiconfigurator's system names, and ours for a measured CPU host -> topologies. Its L40S box reaches 5.2 and 1.4 GB/s on 4
# and 8 GPUs: a topology of its own. B300 and GB300 have the links of B200 and GB200.
AIC_TOPOLOGIES: Mapping[str, str] = {
    "a100_sxm": "dgx_a100_80gb",
    "h100_sxm": "dgx_h100",
    "h200_sxm": "dgx_h200",
    "b200_sxm": "dgx_b200",
    "b300_sxm": "dgx_b200",
    "gb200": "gb200_nvl72",
    "gb300": "gb200_nvl72",
    "l40s": "pcie_8xl40s_no_p2p",
    "rtx_pro_6000_server": "pcie_8xrtx_pro_6000",
    "gloo_loopback": "cpu_x4",
}
_OPS = {"alltoall": "all_to_all", "sendrecv": "send_recv", "all_gather_base": "all_gather", "all_to_allv": "all_to_all"}
_DTYPES = {"half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16", "": "float32"}
_VIDUR_TOPOLOGIES = {
    "a100_dgx": "dgx_a100_80gb",
    "h100_dgx": "dgx_h100",
    "a100_pairwise_nvlink": "pcie_8xa100_bridges",
    "h100_pairwise_nvlink": "pcie_8xa100_bridges",
}
# By what the rows themselves reach: 8-12 GB/s between DGX A100, 2.4 GB/s between boxes of pairs. A DGX H100 keeps
# the cards of its topology.
_VIDUR_NICS = {"a100_dgx": ROCE_100, "a100_pairwise_nvlink": SOCKET_25, "h100_pairwise_nvlink": SOCKET_25}
_VIDUR_SUPPOSED = (
    "one 100 Gbit/s card a DGX A100, one TCP socket between boxes of pairs, sockets of the shipped topology"
)
PARAM_SYSTEM = "v100_dgx1 4 GPUs, host-timed"


def _aic(row: Row) -> CollectiveRow:
    if row["system"] not in AIC_TOPOLOGIES:
        raise ConfigError(f"system: found {row['system']!r}, allowed {', '.join(AIC_TOPOLOGIES)}")
    return CollectiveRow(
        system=row["system"],
        machine=Machine(topology=AIC_TOPOLOGIES[row["system"]]),
        op=_op(row["collective"]),
        bytes=int(row["bytes"]),
        n_ranks=int(row["num_gpus"]),
        dtype=_DTYPES.get(row["dtype"], row["dtype"]),
        version=row["nccl_dir_version"],
        measured_s=float(row["us"]) / US_PER_S,
    )


def _vidur(row: Row) -> CollectiveRow | None:
    """Kineto kernel durations of PyTorch's NCCL, rank skew included.

    The source does not say what NICs, bridges or sockets there are: rows of several nodes and of bridge pairs are priced on
    the machines of _VIDUR_TOPOLOGIES and marked `*`. A40 pairs are left out: no topology has their bridge.
    """
    topology = _VIDUR_TOPOLOGIES.get(row["node"])
    n_ranks, per_node = int(row["num_workers"]), int(row["devices_per_node"])
    if topology is None:
        return None
    nodes = max(n_ranks // per_node, 1)
    assumed = nodes > 1 or "pairwise" in row["node"]
    return CollectiveRow(
        system=f"vidur_{row['node']}{f' {nodes}x{per_node}' if nodes > 1 else ''}{'*' if assumed else ''}",
        machine=Machine(
            topology=topology,
            nodes=nodes,
            per_node=min(per_node, n_ranks),
            nics=_VIDUR_NICS.get(row["node"]) if nodes > 1 else None,
            assumed=_VIDUR_SUPPOSED if assumed else "",
        ),
        op=_op(row["collective"]),
        bytes=int(row["bytes"]),
        n_ranks=n_ranks,
        dtype="float16",
        version="",
        measured_s=float(row["ms_median"]) / MS_PER_S,
    )


# PARAM's host timing on 4 V100 (figure of ml_perf_model's comm_bench.ipynb): its floor below 64 KiB less the kernel of 8 us,
# and whether lists of tensors are flattened by a copy.
_HOST_TIMED: Mapping[str, tuple[float, bool]] = {
    "all_reduce": (73.0, False),
    "reduce": (73.0, False),
    "all_to_all": (74.0, False),
    "all_to_allv": (77.0, False),
    "all_gather_base": (62.0, False),
    "all_gather": (152.0, True),
    "reduce_scatter": (144.0, True),
}
# A copy on V100: reads and writes each byte at 0.73 of 900 GB/s (all_gather less all_gather_base at 1 GiB, same figure).
_COPY_BYTES_PER_S = 655 * GIGA / 2


def _param(row: Row) -> CollectiveRow:
    """PARAM's host-timed latencies on half a DGX-1: the price is the kernel's, the host's floor is added."""
    name, n_bytes = row["collective"], int(row["size_bytes"])
    if name not in _HOST_TIMED:
        raise ConfigError(f"collective: found {name!r}, allowed {', '.join(_HOST_TIMED)}")
    floor_us, copied = _HOST_TIMED[name]
    return CollectiveRow(
        system=PARAM_SYSTEM,
        machine=Machine(topology="dgx1_v100"),
        op=_op(name),
        bytes=n_bytes,
        n_ranks=4,
        dtype="float32",
        version="",
        measured_s=float(row["latency_us_pm4pct"]) / US_PER_S,
        added_s=floor_us / US_PER_S + (n_bytes / _COPY_BYTES_PER_S if copied else 0.0),
    )


def _posted(row: Row) -> CollectiveRow | None:
    """nccl-tests tables that people posted; rows without a time, or of machines not told well enough, are left out."""
    n_ranks, nodes = int(row["gpus"]), int(row["nodes"])
    machine = posted_machine(row["machine"], row["link_type"], n_ranks, nodes)
    if machine is None or not row["time_us"]:
        return None
    return CollectiveRow(
        system=f"posted {machine.title}",
        machine=machine,
        op=_op(row["collective"]),
        bytes=int(row["bytes"]),
        n_ranks=n_ranks,
        dtype=_DTYPES.get(row["dtype"], "float32"),
        version="",
        measured_s=float(row["time_us"]) / US_PER_S,
    )


def _op(name: str) -> str:
    return _OPS.get(name, name)


@dataclass(frozen=True, slots=True)
class Format:
    """Columns that tell a format, and how its rows are read (None: a row of a machine that we have no topology of)."""

    name: str
    columns: frozenset[str]
    read: Callable[[Row], CollectiveRow | None]


FORMATS = (
    Format("aiconfigurator NCCL", frozenset({"system", "collective", "dtype", "num_gpus", "bytes", "us"}), _aic),
    Format("posted nccl-tests", frozenset({"machine", "gpus", "nodes", "link_type", "collective", "time_us"}), _posted),
    Format("Vidur network", frozenset({"node", "collective", "num_workers", "devices_per_node", "ms_median"}), _vidur),
    Format("PARAM host-timed", frozenset({"collective", "size_bytes", "latency_us_pm4pct"}), _param),
)


def is_collective_file(path: Path) -> bool:
    """Whether a file's columns are those of one of FORMATS. Raises ConfigError for a file that cannot be read."""
    with _open(path) as lines:
        header = set(next(csv.reader(lines), []))
    return any(form.columns <= header for form in FORMATS)


def read_collectives(path: Path) -> list[CollectiveRow]:
    """All rows of a CSV file (gzip or plain). Raises ConfigError with one line if it is of no known format or damaged."""
    with _open(path) as lines:
        reader = csv.DictReader(lines)
        header = set(reader.fieldnames or ())
        form = next((form for form in FORMATS if form.columns <= header), None)
        if form is None:
            allowed = "; ".join(f"{form.name} ({', '.join(sorted(form.columns))})" for form in FORMATS)
            raise ConfigError(
                f"{path}: columns: found {', '.join(sorted(header)) or 'none'}, allowed those of {allowed}"
            )
        return list(_rows(path, reader, form))


def left_out(paths: Iterable[Path]) -> list[str]:
    """One line for each machine whose rows are not priced: how many, and why; and what is supposed of others."""
    lines: list[str] = []
    for path in paths:
        dropped: Counter[str] = Counter()
        supposed: dict[str, str] = {}
        with _open(path) as text:
            reader = csv.DictReader(text)
            form = next(form for form in FORMATS if form.columns <= set(reader.fieldnames or ()))
            for row in reader:
                found = form.read(row)
                if found is None:
                    dropped[_why(row)] += 1
                elif found.machine.assumed:
                    supposed[found.system] = found.machine.assumed
        lines += [f"{path.name}: {count} rows left out: {why}" for why, count in sorted(dropped.items())]
        lines += [f"{path.name}: {system}: supposed {what}" for system, what in sorted(supposed.items())]
    return lines


def _why(row: Row) -> str:
    name = row.get("machine") or row.get("node") or ""
    return (
        f"{name}: no time given" if "time_us" in row and not row["time_us"] else f"{name}: no topology of this machine"
    )


def _rows(path: Path, reader: csv.DictReader[str], form: Format) -> Iterator[CollectiveRow]:
    for row in reader:
        try:
            found = form.read(row)
        except ConfigError as error:
            raise ConfigError(f"{path}: line {reader.line_num}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: line {reader.line_num}: needs numbers in the columns of {form.name}: {error}"
            ) from error
        if found is None:
            continue
        if found.measured_s <= 0 or found.n_ranks < 2:
            raise ConfigError(f"{path}: line {reader.line_num}: needs a positive time and two ranks or more")
        yield found


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    """The text of a file, unpacked if it starts with gzip's magic number."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == GZIP_MAGIC
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="") if packed else path.open(encoding="utf-8", newline="")
        ) as lines:
            yield lines
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read as CSV: {error}") from error
