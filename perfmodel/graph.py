"""The execution graph: what one training iteration of a model dispatches. Standard library only.

A `Graph` is a flat tuple of `Op`s in dispatch order. Each op names an aten operator, its input and output tensors, its
non-tensor arguments, the module that called it and its phase. Tensors are metadata only (`TensorSpec`); two tensors with
the same `storage` share memory. Data dependencies follow from tensors and storages (`Graph.producers`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

from perfmodel.errors import GraphError, other_version

SCHEMA_VERSION = 1

Phase = Literal["input", "forward", "loss", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("input", "forward", "loss", "backward", "optimizer")

TO_DEVICE = "perfmodel.host_to_device_copy"
# Attributes of a copy of inputs by how they reach the device: see `config.training.Loop`.
INPUT_COPIES: Mapping[str, Mapping[str, Any]] = {
    "pinned": {},
    "pageable": {"pinned": False},
    "prefetch": {"ahead": True},
}

# Bytes of one element; names are torch's without the prefix.
ITEMSIZE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


MAX_LAYOUTS = 4096  # remembered


@lru_cache(maxsize=MAX_LAYOUTS)
def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if elements with these strides lie in row-major order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Metadata of one tensor: `shape` and `strides` in elements, `dtype` as torch spells it, `storage` its memory's id."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    storage: int

    @property
    def n_elems(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Elements times element size: what a kernel moves when it touches each element once."""
        return self.n_elems * ITEMSIZE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie in row-major order without gaps."""
        return is_row_major(self.shape, self.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call.

    Attributes:
        id: position in the graph.
        name: `aten.mm`, `aten.add_`, `perfmodel.host_to_device_copy`, ... (namespace, dot, operator; no overload).
        overload: `default`, `Tensor`, ...
        inputs, input_names: tensor arguments in schema order, lists flattened; the schema name of each.
        outputs: tensor results, lists flattened; an in-place op returns its mutated input's storage.
        attrs: non-tensor arguments by schema name (numbers, text, booleans, None, lists and dicts of these).
        module: dotted path of the innermost module that called it; of the forward caller for a backward op.
        phase: where in the iteration it runs.
        recompute: True for forward work redone in backward by gradient checkpointing.
        host_sync: True if the host waits for the device here (`.item()`, `nonzero`, blocking copy).
        stream: `compute`, or `copy` for host-device transfers that overlap compute.
    """

    id: int
    name: str
    overload: str = "default"
    inputs: tuple[TensorSpec, ...] = ()
    input_names: tuple[str, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    phase: Phase = "forward"
    recompute: bool = False
    host_sync: bool = False
    stream: Literal["compute", "copy", "copy_back"] = "compute"

    def at(self, number: int) -> Op:
        """The same op at another place of a graph: `dataclasses.replace` in half its time."""
        return Op(
            id=number,
            name=self.name,
            overload=self.overload,
            inputs=self.inputs,
            input_names=self.input_names,
            outputs=self.outputs,
            attrs=self.attrs,
            module=self.module,
            phase=self.phase,
            recompute=self.recompute,
            host_sync=self.host_sync,
            stream=self.stream,
        )

    def arg(self, name: str) -> TensorSpec | None:
        """The tensor argument called `name` in the operator's schema, or None if it was not given."""
        for spec, spec_name in zip(self.inputs, self.input_names, strict=True):
            if spec_name == name:
                return spec
        return None

    def args(self, name: str) -> tuple[TensorSpec, ...]:
        """All tensors of the list argument called `name`."""
        return tuple(s for s, n in zip(self.inputs, self.input_names, strict=True) if n == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A learnable tensor. `grad_op` is the id of the op after which its gradient is complete (None: no gradient)."""

    name: str
    tensor: TensorSpec
    grad_op: int | None
    sparse_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAccess:
    """How an embedding table (a parameter) is looked up: what the kernel model and the sharding plans need to know.

    `pooling_factor` is the mean number of indices per sample. `zipf_exponent` 0 means uniform indices; `histogram`, if
    given, overrides it: pairs of (number of rows, accesses per iteration and row) measured for this table.
    """

    parameter: str
    rows: int
    dim: int
    pooling_factor: float = 1.0
    zipf_exponent: float = 0.0
    histogram: tuple[tuple[float, float], ...] = ()
    weighted: bool = False
    itemsize_bytes: int = 4


# Spreads hot rows over a table; prime, so a multiple of it visits every row of any smaller table once.
ROW_SCATTER = 2_147_483_647


def row_of_rank(rank: int, rows: int) -> int:
    """The row of popularity rank `rank` (0 is the hottest) where nothing is known of the order of a table's rows.

    >>> sorted(row_of_rank(rank, 10) for rank in range(10)) == list(range(10))
    True
    """
    return rank * (ROW_SCATTER % rows or 1) % rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Lifetime of one piece of device memory: born after op `born`, free after op `dies` (-1: before; n_ops: never)."""

    id: int
    bytes: int
    born: int
    dies: int
    kind: Literal["parameter", "buffer", "input", "gradient", "optimizer_state", "activation"] = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Ops of one training iteration in dispatch order, and what the tensors mean.

    Attributes:
        model: name of the model.
        target: kind of device the ops were written for (`cuda` or `cpu`).
        precision: as in the model spec (`fp32`, `tf32`, `amp_bf16`, ...).
        batch_size: samples per rank and iteration.
        values: `meta` if no tensor value was read, `real` if control flow followed real values of the given inputs.
        rewrites: names of the device-specific rewrites applied (docs/architecture.md lists them).
        notes: what was approximated or retried during extraction, for the report.
    """

    model: str
    target: Literal["cuda", "cpu"]
    precision: str
    batch_size: int
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...] = ()
    tables: tuple[TableAccess, ...] = ()
    storages: tuple[Storage, ...] = ()
    optimizer: str = ""
    sparse_optimizer: str = ""
    values: Literal["meta", "real"] = "meta"
    rewrites: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def producers(self) -> dict[int, int]:
        """Maps each storage id to the id of the op that wrote it first (inputs and parameters are absent)."""
        known: dict[int, int] = {}
        read: set[int] = set()
        for op in self.ops:
            read.update(spec.storage for spec in op.inputs)
            for spec in op.outputs:
                if spec.storage not in read:
                    known.setdefault(spec.storage, op.id)
        return known

    def to_json(self) -> str:
        """The graph as versioned JSON text; `from_json` restores an equal graph."""
        tensors: dict[int, TensorSpec] = {}
        ops = [_op_to_dict(op, tensors) for op in self.ops]
        parameters = []
        for parameter in self.parameters:
            tensors[parameter.tensor.id] = parameter.tensor
            parameters.append({**asdict(parameter), "tensor": parameter.tensor.id})
        body: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "model target precision batch_size optimizer sparse_optimizer values rewrites notes".split()  # noqa: SIM905 -- a word list reads better than nine quoted strings
            )
        }
        body |= {
            "schema_version": SCHEMA_VERSION,
            "tensors": [[t.id, t.shape, t.dtype, t.strides, t.storage] for t in tensors.values()],
            "ops": ops,
            "parameters": parameters,
            "tables": [asdict(table) for table in self.tables],
            "storages": [[s.id, s.bytes, s.born, s.dies, s.kind] for s in self.storages],
        }
        return json.dumps(body, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Graph:
        """Reads a graph written by `to_json`. Raises GraphError if the text is not such a graph."""
        try:
            return _graph_from_dict(json.loads(text))
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
            raise GraphError(f"not a perfmodel graph: {type(error).__name__}: {error}") from error


def _op_to_dict(op: Op, tensors: dict[int, TensorSpec]) -> dict[str, Any]:
    for spec in (*op.inputs, *op.outputs):
        tensors[spec.id] = spec
    row: dict[str, Any] = {
        "name": op.name,
        "overload": op.overload,
        "inputs": [spec.id for spec in op.inputs],
        "input_names": op.input_names,
        "outputs": [spec.id for spec in op.outputs],
        "attrs": dict(op.attrs),
        "module": op.module,
        "phase": op.phase,
    }
    if op.recompute:
        row["recompute"] = True
    if op.host_sync:
        row["host_sync"] = True
    if op.stream != "compute":
        row["stream"] = op.stream
    return row


def _graph_from_dict(body: Mapping[str, Any]) -> Graph:
    version = body["schema_version"]
    if version != SCHEMA_VERSION:
        raise GraphError(other_version("graph", version, SCHEMA_VERSION, "extract it again"))
    tensors = {
        row[0]: TensorSpec(id=row[0], shape=tuple(row[1]), dtype=row[2], strides=tuple(row[3]), storage=row[4])
        for row in body["tensors"]
    }
    return Graph(
        model=body["model"],
        target=body["target"],
        precision=body["precision"],
        batch_size=body["batch_size"],
        ops=tuple(_op_from_dict(index, row, tensors) for index, row in enumerate(body["ops"])),
        parameters=tuple(Parameter(**{**row, "tensor": tensors[row["tensor"]]}) for row in body["parameters"]),
        tables=tuple(
            TableAccess(**{**row, "histogram": tuple(tuple(pair) for pair in row["histogram"])})
            for row in body["tables"]
        ),
        storages=tuple(
            Storage(id=row[0], bytes=row[1], born=row[2], dies=row[3], kind=row[4]) for row in body["storages"]
        ),
        optimizer=body["optimizer"],
        sparse_optimizer=body["sparse_optimizer"],
        values=body["values"],
        rewrites=tuple(body["rewrites"]),
        notes=tuple(body["notes"]),
    )


def _op_from_dict(index: int, row: Mapping[str, Any], tensors: Mapping[int, TensorSpec]) -> Op:
    return Op(
        id=index,
        name=row["name"],
        overload=row["overload"],
        inputs=_specs(row["inputs"], tensors),
        input_names=tuple(row["input_names"]),
        outputs=_specs(row["outputs"], tensors),
        attrs=row["attrs"],
        module=row["module"],
        phase=row["phase"],
        recompute=row.get("recompute", False),
        host_sync=row.get("host_sync", False),
        stream=row.get("stream", "compute"),
    )


def _specs(ids: Sequence[int], tensors: Mapping[int, TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(tensors[i] for i in ids)
