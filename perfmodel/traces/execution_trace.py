"""Execution traces: which ops a step ran on what, and in which order. PyTorch's and Chakra's, as JSON.

Read: PyTorch schema 1.0.x (flat fields) and 1.1.x (`inputs: {values, shapes, types}`, `ctrl_deps`), and Chakra nodes in the
JSON form of their protobuf messages (either spelling of field names). Written: Chakra, field names as in `et_def.proto`, so
that `google.protobuf.json_format.ParseDict` turns each node into a message. A file holds an object with `nodes`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfmodel.errors import ConfigError
from perfmodel.pipeline.run import Run
from perfmodel.sim.program import HOST
from perfmodel.traces.json_stream import ItemStream
from perfmodel.traces.spans import Note
from perfmodel.units import PS_PER_S, US_PER_S

LIST_KEYS = ("nodes",)
SCHEMA = "1.1.1-chakra.0.0.4"
# enum NodeType and enum CollectiveCommType of Chakra's et_def.proto (mlcommons/chakra, schema 0.0.4).
COMP_NODE, COMM_SEND_NODE, COMM_COLL_NODE = 4, 5, 7
_TYPE_NAMES = {"COMP_NODE": 4, "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7, "METADATA_NODE": 1}
_COMM_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "all_to_all_v": 6,
    "reduce_scatter": 7,
    "barrier": 9,
    "send_recv": 6,
}
_EXACT = "perfmodel_duration_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One op, kernel, collective or annotation.

    `parent` (0: none) is the node around it. `duration_s` is 0 where the trace has no times (PyTorch's have none).
    `record_id` is the record function id that the same op has in a Kineto trace.
    """

    id: int
    name: str
    type: int = COMP_NODE
    parent: int = 0
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    start_s: float = 0.0
    duration_s: float = 0.0
    record_id: int = 0
    sequence: int = -1
    thread: int = 0
    schema: str = ""
    inputs: tuple[Any, ...] = ()
    input_shapes: tuple[Any, ...] = ()
    input_types: tuple[str, ...] = ()
    output_shapes: tuple[Any, ...] = ()
    output_types: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTrace:
    """Nodes of one rank, in order of id."""

    path: str
    schema: str
    nodes: tuple[TraceNode, ...]
    notes: tuple[Note, ...] = ()

    @property
    def n_ops(self) -> int:
        """Nodes that are operators."""
        return sum("::" in node.name for node in self.nodes)


def read_execution_trace(path: str | Path, *, salvage: bool = False) -> ExecutionTrace:
    """Reads an execution trace.

    Raises:
        ConfigError: the file is missing, damaged, or holds no nodes.
    """
    return nodes_of_stream(path, ItemStream(Path(path), LIST_KEYS, salvage=salvage))


def nodes_of_stream(path: str | Path, stream: ItemStream) -> ExecutionTrace:
    """As `read_execution_trace`, of an open stream."""
    counts: Counter[str] = Counter()
    nodes: dict[int, TraceNode] = {}
    for item in stream:
        node = _node(item) if isinstance(item, dict) else None
        if node is None:
            counts["without an id or a name"] += 1
        elif node.id in nodes:
            counts["whose id another node has"] += 1
        else:
            nodes[node.id] = node
    if not nodes:
        raise ConfigError([f"{path}: nodes: none found; an execution trace has this list", *stream.lost])
    notes = [Note(kind="dropped", text=f"lost with the damage: {line}") for line in stream.lost]
    notes += [Note(kind="dropped", text=f"nodes {text}", count=count) for text, count in sorted(counts.items())]
    unknown = sum(dep not in nodes for node in nodes.values() for dep in (*node.data_deps, *node.ctrl_deps))
    if unknown:
        notes.append(Note(kind="missing", text="nodes that others depend on", count=unknown))
    return ExecutionTrace(
        path=str(path),
        schema=str(stream.header.get("schema", "")),
        nodes=tuple(nodes[key] for key in sorted(nodes)),
        notes=tuple(notes),
    )


def _node(body: Mapping[str, Any]) -> TraceNode | None:
    number, name = _count(body.get("id"), -1), body.get("name")
    if number < 0 or not isinstance(name, str):
        return None
    inputs, outputs = body.get("inputs"), body.get("outputs")
    attrs = _attributes(body.get("attrs", body.get("attr")))
    if isinstance(inputs, dict):  # 1.1.x
        values, shapes, types = (_tuple(inputs.get(key)) for key in ("values", "shapes", "types"))
        out_shapes, out_types = (
            (_tuple(outputs.get("shapes")), _tuple(outputs.get("types"))) if isinstance(outputs, dict) else ((), ())
        )
    else:
        values, shapes, types = (_tuple(body.get(key)) for key in ("inputs", "input_shapes", "input_types"))
        out_shapes, out_types = _tuple(body.get("output_shapes")), _tuple(body.get("output_types"))
    ctrl = _ids(body.get("ctrl_deps", body.get("ctrlDeps")))
    plain = not isinstance(body.get("ctrl_deps"), list)  # PyTorch 1.1.x names the parent as the one control dependency
    parent = _count(body.get("parent"), _count(body.get("ctrl_deps")) if plain else 0)
    micros = (_number(_either(body, "start_time_micros")), _number(_either(body, "duration_micros")))
    exact: Any = attrs.get(_EXACT)
    return TraceNode(
        id=number,
        name=name,
        type=_type(body.get("type")),
        parent=parent,
        data_deps=_ids(_either(body, "data_deps")),
        ctrl_deps=ctrl,
        start_s=micros[0] / US_PER_S,
        duration_s=float(exact) if type(exact) in (int, float) else micros[1] / US_PER_S,
        record_id=_count(body.get("rf_id"), _count(attrs.get("rf_id"))),
        sequence=_count(body.get("seq_id"), _count(attrs.get("seq_id"), -1)),
        thread=_count(body.get("tid"), _count(attrs.get("tid"))),
        schema=str(body.get("op_schema", attrs.get("op_schema", ""))),
        inputs=values,
        input_shapes=shapes,
        input_types=tuple(map(str, types)),
        output_shapes=out_shapes,
        output_types=tuple(map(str, out_types)),
        attrs=attrs,
    )


def _either(body: Mapping[str, Any], key: str) -> Any:
    """A field by its name in the .proto file, or as protobuf spells it in JSON."""
    first, *rest = key.split("_")
    return body.get(key, body.get(first + "".join(part.title() for part in rest)))


def _attributes(listed: Any) -> dict[str, Any]:
    """PyTorch's `{name, type, value}` and Chakra's `{name, <type>_val: value}`."""
    found: dict[str, Any] = {}
    for row in listed if isinstance(listed, list) else ():
        if isinstance(row, dict) and isinstance(row.get("name"), str):
            value = next(
                (v for k, v in row.items() if k == "value" or k.lower().replace("_", "").endswith("val")), None
            )
            found[row["name"]] = value
    return found


def _type(value: Any) -> int:
    return _TYPE_NAMES.get(value, COMP_NODE) if isinstance(value, str) else _count(value, COMP_NODE)


def _number(value: Any) -> float:
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return found if -1e18 < found < 1e18 else 0.0


def _count(value: Any, default: int = 0) -> int:
    """A whole number, also as the text that protobuf writes for 64-bit ones."""
    if isinstance(value, str) and value.lstrip("-").isdecimal() and len(value) < 20:
        return int(value)
    return value if type(value) is int and abs(value) < 2**63 else default


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(number for part in value if (number := _count(part, -1)) >= 0)
    return (value,) if type(value) is int and value > 0 else ()


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(_tuple(part) if isinstance(part, list) else part for part in value) if isinstance(value, list) else ()


def chakra_document(run: Run, index: int = 0) -> dict[str, Any]:
    """One rank class of a prediction as a Chakra execution trace: a node a task, with the dependencies of its program."""
    lowered = run.classes[index]
    program, timeline = lowered.program, run.steady.timeline
    starts = timeline.starts(index) - timeline.begin_ps
    nodes = []
    last: dict[int, int] = {}
    at = 0
    for task, count in enumerate(program.dep_count.tolist()):
        deps = sorted({dep + 1 for dep in program.dep_index[at : at + count].tolist()})
        at += count
        stream = int(program.stream[task])
        info = lowered.tasks[task]
        event = lowered.rank_class.events[info.event]
        duration_s = int(program.duration_ps[task]) / PS_PER_S
        attrs: list[dict[str, Any]] = [
            {"name": "is_cpu_op", "bool_val": stream == HOST or lowered.device.kind == "cpu"},
            {"name": "stream", "int64_val": stream},
            {"name": "phase", "string_val": event.phase},
            {"name": _EXACT, "double_val": duration_s},
        ]
        kind = COMP_NODE
        if event.collective is not None and stream != HOST:
            kind = COMM_COLL_NODE
            attrs += [
                {"name": "comm_type", "int64_val": _COMM_TYPES[event.collective.op]},
                {"name": "comm_size", "int64_val": event.collective.bytes},
                {"name": "comm_group", "string_val": ",".join(map(str, event.collective.ranks))},
            ]
        nodes.append(
            {
                "id": task + 1,
                "name": event.label if stream != HOST else f"host {event.label}",
                "type": kind,
                "ctrl_deps": [last[stream]] if stream in last else [],
                "data_deps": deps,
                "start_time_micros": max(round(int(starts[task]) * US_PER_S / PS_PER_S), 0),
                "duration_micros": round(duration_s * US_PER_S),
                "attr": attrs,
            }
        )
        last[stream] = task + 1
    metadata = {"version": SCHEMA, "attr": [{"name": "model", "string_val": run.prediction.model}]}
    return {"schema": SCHEMA, "global_metadata": metadata, "rank": lowered.rank_class.representative, "nodes": nodes}


def chakra_json(document: Mapping[str, Any]) -> str:
    """A document as JSON text."""
    return json.dumps(document, separators=(",", ":"))


def is_collective(node: TraceNode) -> bool:
    """True for a collective: Chakra's node type, or PyTorch's record of one (`nccl:all_reduce`)."""
    return node.type == COMM_COLL_NODE or node.name.startswith(("nccl:", "gloo:"))
