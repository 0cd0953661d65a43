"""Which tensors of a graph hold the same value, so that one collected copy serves every op that needs it whole."""

from __future__ import annotations

from perfmodel.graph import Op, TensorSpec

_ALL_OF_IT = """
view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten t transpose permute detach alias
"""
_PART_OF_IT = "expand expand_as slice select split split_with_sizes chunk narrow diagonal unbind unfold as_strided"
_COPIES = "_to_copy clone contiguous"
WHOLE_VIEWS = frozenset(f"aten.{name}" for name in _ALL_OF_IT.split())
PART_VIEWS = frozenset(f"aten.{name}" for name in _PART_OF_IT.split())
COPIES = frozenset(f"aten.{name}" for name in _COPIES.split())


class Values:
    """Numbers of values by tensor, followed op by op.

    Views of all of a tensor and copies of one dtype have its value; a view of a part has its own; an op that writes a storage
    gives all tensors in it new values.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by tensor id
        self._tensors: dict[int, set[int]] = {}  # ids seen in a storage
        self._copies: dict[tuple[int, str], int] = {}  # by value and dtype
        self._last = 0

    def of(self, spec: TensorSpec) -> int:
        """The number of a tensor's value: equal numbers, equal values."""
        if spec.id not in self._numbers:
            self._give(spec, self._fresh())
        return self._numbers[spec.id]

    def follow(self, op: Op) -> None:
        """What an op makes of the values that it reads and writes; to be called once an op, in order."""
        if op.name in WHOLE_VIEWS:
            self._give(op.outputs[0], self.of(op.inputs[0]))
        elif op.name in COPIES:
            source, copy = op.inputs[0], op.outputs[0]
            value = self.of(source)
            if copy.dtype != source.dtype:
                value = self._copies.setdefault((value, copy.dtype), self._fresh())
            self._give(copy, value)
        elif op.name not in PART_VIEWS:
            for storage in {spec.storage for spec in op.outputs if spec.storage in self._tensors}:
                for number in self._tensors[storage]:
                    self._numbers[number] = self._fresh()

    def _give(self, spec: TensorSpec, value: int) -> None:
        self._numbers[spec.id] = value
        self._tensors.setdefault(spec.storage, set()).add(spec.id)

    def _fresh(self) -> int:
        self._last += 1
        return self._last


def layer_of(module: str) -> str:
    """The path of the repeated layer that a module is in, up to its first number; empty outside of layers.

    >>> layer_of("model.layers.5.mlp.experts.0.up_proj"), layer_of("lm_head")
    ('model.layers.5', '')
    """
    parts = module.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: number + 1])
