"""TopologySpec -> the YAML text a person would write: quantities with units, defaults left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from perfmodel.config.topology import GpuSpec, TopologySpec
from perfmodel.units import format_rate, format_time

_WIDTH = 110


def dump_topology(spec: TopologySpec, notes: Sequence[str] = ()) -> str:
    """YAML that `load_topology` reads back as an equal spec; `notes` stand above it as comments."""
    plain = _plain(spec)
    plain = {"name": spec.name, **{key: value for key, value in plain.items() if key != "name"}}
    text = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=_WIDTH)
    return "".join(f"# {line}\n" for note in notes for line in _wrapped(note)) + text


class _Dumper(yaml.SafeDumper):
    """SafeDumper without anchors: equal parts are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never an alias."""
        return True


def _plain(spec: BaseModel) -> dict[str, Any]:
    """Mappings, lists and text of a spec, without the fields that have their default."""
    plain: dict[str, Any] = {}
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        required = field.is_required()
        if required or value != field.get_default(call_default_factory=True):
            plain[name] = _plain_value(name, value)
    return plain


def _plain_value(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value)
    if isinstance(value, tuple):
        plain = [_plain_value(name, item) for item in value]
        return plain[0] if len(value) == 1 and isinstance(value[0], GpuSpec) else plain
    if isinstance(value, Mapping):
        return {key: _plain_value(name, item) for key, item in value.items()}
    if isinstance(value, float) and name.endswith("bandwidth"):
        return format_rate(value, digits=None)
    if isinstance(value, float) and name.endswith("latency"):
        return format_time(value, digits=None)
    if isinstance(value, int) and name in ("memory", "ssd"):
        return f"{value} B"
    if isinstance(value, str) and name in ("switches", "switch_trees", "host_bridges", "sockets"):
        return int(value.removeprefix("gpu")) if value.startswith("gpu") else value
    return value


def _wrapped(note: str) -> list[str]:
    lines, line = [], ""
    for word in note.split():
        if line and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
