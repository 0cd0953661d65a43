"""Reads the text of `nvidia-smi topo -m` and `nvidia-smi topo -p2p r`: labels only, no judgement of what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfmodel.errors import TopologyError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
_LABEL = re.compile(r"X|NV[1-9][0-9]?|SYS|SOC|NODE|PHB|PXB|PIX")
_P2P_LABEL = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U")
_GPU = re.compile(r"GPU[0-9]+")
_LEGEND = re.compile(r"^\s*(NIC )?Legend:?\s*$", re.MULTILINE)
_NIC_NAME = re.compile(r"^\s*(NIC[0-9]+):\s*(\S+)\s*$", re.MULTILINE)
# Words of the columns behind the matrix: CPU Affinity, NUMA Affinity, GPU NUMA ID.
_COLUMN_WORDS = frozenset({"CPU", "Affinity", "NUMA", "GPU", "ID"})
MAX_SMI_CHARS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiMatrix:
    """A matrix as printed.

    Attributes:
        names: GPUs and NICs in the order of the header.
        label: per ordered pair of names, without the diagonal; SOC of old drivers reads SYS.
        cpu_affinity: per GPU the CPU list as printed; "" where the column or cell is missing.
        numa_affinity: per GPU the NUMA cell as printed, likewise.
        nic_names: system names of NICs (mlx5_0), from the NIC legend.
    """

    names: tuple[str, ...]
    label: Mapping[tuple[str, str], str]
    cpu_affinity: Mapping[str, str]
    numa_affinity: Mapping[str, str]
    nic_names: Mapping[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs, in order."""
        return tuple(name for name in self.names if _GPU.fullmatch(name))

    @property
    def nics(self) -> tuple[str, ...]:
        """Names of the NICs, in order."""
        return tuple(name for name in self.names if not _GPU.fullmatch(name))


def parse_smi_matrix(text: str) -> SmiMatrix:
    """The matrix of `nvidia-smi topo -m`, plain, coloured, with tabs or spaces, with lines wrapped by the terminal.

    Raises:
        TopologyError: no matrix, an unknown label, a missing row or cell, or two labels for one pair.
    """
    return _parse(text, _LABEL)


def parse_p2p_matrix(text: str) -> SmiMatrix:
    """The matrix of `nvidia-smi topo -p2p r` (or `-p2p w`, `-p2p rw`). Raises TopologyError as parse_smi_matrix does."""
    return _parse(text, _P2P_LABEL)


def _parse(text: str, label: re.Pattern[str]) -> SmiMatrix:
    if len(text) > MAX_SMI_CHARS:
        raise TopologyError(f"matrix: found {len(text)} characters, allowed {MAX_SMI_CHARS}")
    clean = _ANSI.sub("", text)
    nic_names = dict(_NIC_NAME.findall(clean))
    body = _LEGEND.split(clean, maxsplit=1)[0]
    failure: TopologyError | None = None
    for candidate in _unwrapped(body):
        try:
            return _read_tokens(candidate.split(), label, nic_names)
        except TopologyError as error:
            failure = failure or error
    raise failure or TopologyError("matrix: the text is empty")


def _unwrapped(body: str) -> Iterator[str]:
    """The body as it stands (a wrap between cells is only white space), then with lines cut inside a cell put together."""
    yield body
    lines = [line for line in body.splitlines() if line.strip()]
    width = max((len(line) for line in lines), default=0)
    yield "".join(line if len(line) == width else line + "\n" for line in lines)


def _read_tokens(tokens: Sequence[str], label: re.Pattern[str], nic_names: Mapping[str, str]) -> SmiMatrix:
    names, n_columns, position = _read_header(tokens)
    known = set(names)
    rows: dict[str, list[str]] = {}
    while position < len(tokens) and tokens[position] in known and tokens[position] not in rows:
        row = tokens[position]
        cells = list(tokens[position + 1 : position + 1 + len(names)])
        _check_row(row, cells, names, label)
        position += 1 + len(names)
        rows[row] = cells
        extra: list[str] = []
        while position < len(tokens) and tokens[position] not in known:
            extra.append(tokens[position])
            position += 1
        if len(extra) > n_columns:
            if position < len(tokens):
                raise TopologyError(
                    f"matrix: row {row} has {len(extra)} cells behind the labels, the header {n_columns}"
                )
            del extra[n_columns:]  # a shell prompt or other text after the last row
        rows[row] += extra
    missing = [name for name in names if _GPU.fullmatch(name) and name not in rows]
    if missing:
        raise TopologyError(f"matrix: {missing[0]} has a column but no row")
    return _assemble(names, rows, nic_names, has_numa="NUMA" in tokens)


def _read_header(tokens: Sequence[str]) -> tuple[tuple[str, ...], int, int]:
    """Names of the columns, how many cells may follow a row's labels, and where the rows begin."""
    start = next((i for i, token in enumerate(tokens) if _GPU.fullmatch(token)), None)
    if start is None:
        raise TopologyError("matrix: no column GPU0; allowed the output of `nvidia-smi topo -m`")
    names: list[str] = []
    position = start
    while position < len(tokens) and tokens[position] not in names:
        if tokens[position] in _COLUMN_WORDS:
            break
        names.append(tokens[position])
        position += 1
    columns = position
    while position < len(tokens) and tokens[position] in _COLUMN_WORDS:
        position += 1
    words = tokens[columns:position]
    return tuple(names), sum(word in ("Affinity", "ID") for word in words), position


def _check_row(row: str, cells: Sequence[str], names: Sequence[str], label: re.Pattern[str]) -> None:
    for name, cell in zip(names, cells, strict=False):
        if not label.fullmatch(cell):
            allowed = label.pattern.replace("[1-9][0-9]?", "#").replace("|", ", ")
            raise TopologyError(f"matrix: {row} to {name}: found {cell!r}, allowed {allowed}")
        if (cell == "X") != (row == name):
            raise TopologyError(f"matrix: {row} to {name}: found {cell!r}; X stands for a device and itself only")
        if cell.startswith("NV") and not (_GPU.fullmatch(row) and _GPU.fullmatch(name)):
            raise TopologyError(f"matrix: {row} to {name}: found {cell!r}, but NVLink joins GPUs only")
    if len(cells) < len(names):
        raise TopologyError(f"matrix: row {row} has {len(cells)} labels for {len(names)} columns")


def _assemble(
    names: Sequence[str], rows: Mapping[str, Sequence[str]], nic_names: Mapping[str, str], *, has_numa: bool
) -> SmiMatrix:
    labels: dict[tuple[str, str], str] = {}
    for row, cells in rows.items():
        for name, cell in zip(names, cells, strict=False):
            if name != row:
                labels[row, name] = "SYS" if cell == "SOC" else cell
    for (row, name), cell in list(labels.items()):
        back = labels.setdefault((name, row), cell)
        if back != cell:
            raise TopologyError(f"matrix: {row} and {name}: {cell} one way, {back} the other")
    behind = {row: [*cells[len(names) :], "", ""] for row, cells in rows.items()}
    return SmiMatrix(
        names=tuple(names),
        label=labels,
        cpu_affinity={row: extra[0] for row, extra in behind.items() if _GPU.fullmatch(row)},
        numa_affinity={row: extra[1] if has_numa else "" for row, extra in behind.items() if _GPU.fullmatch(row)},
        nic_names=dict(nic_names),
    )
