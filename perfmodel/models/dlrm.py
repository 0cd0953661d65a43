"""DLRM (Naumov et al. 2019, arXiv:1906.00091) with pooled tables; DCN v2 interaction as in Wang et al. 2021."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from perfmodel.config.dlrm import Distribution, DlrmSpec, Interaction, Table
from perfmodel.errors import ConfigError
from perfmodel.graph import TableAccess
from perfmodel.models.built import CONVERTED, PARAMETER_DTYPE
from perfmodel.models.dlrm_parts import CallMlp, CallTopMlp, GatherTable
from perfmodel.models.fused import dot_interaction
from perfmodel.models.indices import draw_indices, draw_lengths, offsets_of, popularity_classes

_TABLE_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Mlp(nn.Sequential):
    """Linear layers with ReLU between them, and after the last one if `activate_last`."""

    def __init__(self, n_in: int, widths: Sequence[int], *, activate_last: bool) -> None:
        layers: list[nn.Module] = []
        for position, width in enumerate(widths):
            layers.append(nn.Linear(n_in, width))
            if activate_last or position < len(widths) - 1:
                layers.append(nn.ReLU())
            n_in = width
        super().__init__(*layers)


class SparseArch(nn.Module):
    """The embedding tables. Features that share a table are looked up in one call, as are those of joint tables."""

    def __init__(self, lookups: Sequence[tuple[str, Sequence[Table]]], kind: str) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict()
        self.gathers = kind != "bag"
        tables = [_as_one(name, members) for name, members in lookups]
        for table in tables:
            dtype, dim = _TABLE_DTYPE[table.precision], int(table.dim or 0)
            bag: nn.Module
            if self.gathers:
                bag = GatherTable(table.rows, dim, fused=kind == "fused_gather", dtype=dtype)
            else:
                bag = nn.EmbeddingBag(table.rows, dim, mode="sum", sparse=True, dtype=dtype)
            try:
                self.embedding_bags[str(table.name)] = bag
            except KeyError as error:
                raise ConfigError(f"tables.{table.name}: torch keeps this name for itself, allowed another") from error
        self.n_features = [len(t.pooling_factor) for t in tables]
        self.joint = [len(members) > 1 for _, members in lookups]

    def forward(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """One (batch, dim) tensor for each feature, tables in order; (batch, features * dim) of a joint table.

        A gather gives them in `dtype`, bags in that of the tables.
        """
        vectors: list[Tensor] = []
        if self.gathers:
            return [table(index, dtype) for table, index in zip(self.embedding_bags.values(), indices, strict=True)]
        for bag, n_features, joint, index, offset, weight in zip(
            self.embedding_bags.values(), self.n_features, self.joint, indices, offsets, weights, strict=True
        ):
            pooled = bag(index, offset, per_sample_weights=weight)
            if joint:
                vectors.append(pooled.view(-1, n_features * pooled.shape[1]))
            else:
                vectors += pooled.view(n_features, -1, pooled.shape[1]).unbind(0) if n_features > 1 else [pooled]
        return vectors


class DotInteraction(nn.Module):
    """Dot products of all pairs of feature vectors, after the dense vector itself."""

    first: Tensor
    second: Tensor

    def __init__(self, n_vectors: int) -> None:
        super().__init__()
        pairs = torch.tril_indices(n_vectors, n_vectors, offset=-1)
        self.register_buffer("first", pairs[0], persistent=False)
        self.register_buffer("second", pairs[1], persistent=False)

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """(batch, dim + pairs) from the dense vector and the embedded ones, all (batch, dim)."""
        stacked = torch.cat([dense, *vectors], dim=1).view(dense.shape[0], -1, dense.shape[1])
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        return torch.cat([dense, products[:, self.first, self.second]], dim=1)


class FusedDotInteraction(nn.Module):
    """As DotInteraction, followed by zeros, in one kernel."""

    def __init__(self, n_padding: int, *, from_stack: bool) -> None:
        super().__init__()
        self.n_padding = n_padding
        self.from_stack = from_stack

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """(batch, dim + pairs + padding) from the dense vector and the embedded ones, all (batch, dim)."""
        stacked = torch.cat([dense, *vectors], dim=1).view(dense.shape[0], -1, dense.shape[1])
        first = stacked[:, 0] if self.from_stack else dense
        crossed: Tensor = dot_interaction(stacked, first, self.n_padding)
        return crossed


class CatInteraction(nn.Module):
    """Concatenation of the dense vector and the embedded ones."""

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """(batch, sum of widths)."""
        return torch.cat([dense, *vectors], dim=1)


class CrossInteraction(nn.Module):
    """Low-rank cross layers on the concatenation: x <- x0 * (W (V x) + b) + x (DCN v2, section 3.2)."""

    def __init__(self, width: int, n_layers: int, rank: int) -> None:
        super().__init__()
        self.v_kernels = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(n_layers))
        self.w_kernels = nn.ModuleList(nn.Linear(rank, width) for _ in range(n_layers))

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """(batch, sum of widths)."""
        start = torch.cat([dense, *vectors], dim=1)
        crossed = start
        for v_kernel, w_kernel in zip(self.v_kernels, self.w_kernels, strict=True):
            crossed = start * w_kernel(v_kernel(crossed)) + crossed
        return crossed


class Dlrm(nn.Module):
    """Logits (batch, outputs) of dense inputs (batch, features) and, for each table, indices, offsets and weights."""

    def __init__(self, spec: DlrmSpec) -> None:
        super().__init__()
        widths = [int(t.dim or 0) for t in spec.expanded_tables for _ in t.pooling_factor]
        apex = spec.mlp == "apex"
        self.dense_arch: nn.Module = (
            CallMlp(spec.dense_features, spec.bottom_mlp)
            if apex
            else Mlp(spec.dense_features, spec.bottom_mlp, activate_last=True)
        )
        self.sparse_arch = SparseArch(spec.lookups, spec.lookup)
        self.inter_arch, n_out = _interaction(spec.interaction, spec.bottom_mlp[-1], widths)
        padded = n_out + -n_out % spec.interaction.pad_to_multiple
        self.n_padding = 0 if spec.interaction.fused else padded - n_out
        self.over_arch: nn.Module = (
            CallTopMlp(padded, spec.top_mlp) if apex else Mlp(padded, spec.top_mlp, activate_last=False)
        )
        self.dense_dtype: torch.dtype | None = None
        if spec.weights == "fp16":
            self.dense_dtype = torch.float16
            self.dense_arch.half()
            self.over_arch.half()

    def forward(
        self,
        dense: Tensor,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor | None],
        weights: Sequence[Tensor | None],
    ) -> Tensor:
        """Runs the bottom MLP, the tables, the interaction and the top MLP."""
        hidden = self.dense_arch(dense if self.dense_dtype is None else dense.to(self.dense_dtype))
        vectors = [v.to(hidden.dtype) for v in self.sparse_arch(indices, offsets, weights, hidden.dtype)]
        crossed = self.inter_arch(hidden, vectors)
        if self.n_padding:
            crossed = fn.pad(crossed, (0, self.n_padding))
        logits: Tensor = self.over_arch(crossed)
        return logits


def _interaction(spec: Interaction, dense_width: int, widths: Sequence[int]) -> tuple[nn.Module, int]:
    """The interaction module and its output width."""
    total = dense_width + sum(widths)
    if spec.kind == "cat":
        return CatInteraction(), total
    if spec.kind == "dcnv2":
        return CrossInteraction(total, spec.layers, spec.rank), total
    n_vectors = 1 + len(widths)
    n_out = dense_width + n_vectors * (n_vectors - 1) // 2
    if spec.fused:
        return FusedDotInteraction(-n_out % spec.pad_to_multiple, from_stack=spec.dense_from_stack), n_out
    return DotInteraction(n_vectors), n_out


def build_parts(spec: DlrmSpec, device: str, seed: int) -> dict[str, Any]:
    """BuiltModel fields of a DLRM on a device; `seed` draws weights and inputs where the device holds values."""
    dtype = PARAMETER_DTYPE[spec.precision]
    with torch.device(device):
        module = Dlrm(spec)
        if spec.precision in CONVERTED:
            module = module.to(dtype)
    args, target = draw_batch(spec, device, seed)
    return {
        "module": module,
        "args": args,
        "loss": click_loss(target),
        "targets": (target,),
        "tables": tuple(_access(_as_one(name, members), module) for name, members in spec.lookups),
        "precision": "fp16" if spec.weights == "fp16" else spec.precision,
        "sparse_optimizer": spec.sparse_optimizer.name,
        "sparse_optimizer_kwargs": {"fused": spec.sparse_optimizer.fused},
    }


def draw_batch(spec: DlrmSpec, device: str, seed: int) -> tuple[tuple[Any, ...], Tensor]:
    """What the module is called with for one batch, and its target; every seed draws other rows of the tables."""
    dtype, rng = PARAMETER_DTYPE[spec.precision], np.random.default_rng(seed)
    dense = torch.empty(spec.batch_size, spec.dense_features, dtype=dtype, device=device)
    target = torch.empty(spec.batch_size, spec.top_mlp[-1], dtype=dtype, device=device)
    lookups = [_lookup(members, spec.batch_size, device, rng) for _, members in spec.lookups]
    if spec.lookup != "bag":
        lookups = [
            _rows_of_samples(lookup, spec.batch_size, members)
            for lookup, (_, members) in zip(lookups, spec.lookups, strict=True)
        ]
    if device != "meta":
        dense.copy_(torch.from_numpy(rng.random(dense.shape)))
        target.copy_(torch.from_numpy(rng.integers(0, 2, target.shape)))
    indices, offsets, weights = ([lookup[part] for lookup in lookups] for part in range(3))
    return (dense, indices, offsets, weights), target


def click_loss(target: Tensor) -> Callable[[Tensor], Tensor]:
    """From logits to the binary cross-entropy with the target."""
    return partial(_click_loss, target)


def _click_loss(target: Tensor, logits: Tensor) -> Tensor:
    return fn.binary_cross_entropy_with_logits(logits, target.to(logits.dtype))


def _as_one(name: str, members: Sequence[Table]) -> Table:
    """The table that a group of tables is looked up as: their rows one after another, their features in order."""
    if len(members) == 1:
        return members[0].model_copy(update={"name": name})
    classes = [popularity_classes(t.distribution or Distribution(), t.rows, sum(t.pooling_factor)) for t in members]
    update = {
        "name": name,
        "rows": sum(t.rows for t in members),
        "pooling_factor": tuple(mean for t in members for mean in t.pooling_factor),
        "distribution": Distribution(histogram=tuple(pair for pairs in classes for pair in pairs)),
    }
    return members[0].model_copy(update=update)


def _rows_of_samples(
    lookup: tuple[Tensor, Tensor | None, Tensor | None], batch_size: int, members: Sequence[Table]
) -> tuple[Tensor, None, None]:
    """Indices (batch, features) of a lookup with one index a feature; no offsets."""
    indices = lookup[0]
    joint = len(members) > 1
    return indices.view(batch_size, -1) if joint else indices.view(-1, batch_size).T.contiguous(), None, None


def _lookup(
    members: Sequence[Table], batch_size: int, device: str, rng: np.random.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Indices, offsets and weights of one lookup.

    The features that share a table lie one after another; those of joint tables side by side, sample after sample.
    """
    table = members[0]
    means = [mean for member in members for mean in member.pooling_factor]
    lengths = [round(mean * batch_size) for mean in means]
    n_indices, n_bags = sum(lengths), batch_size * len(lengths)
    weight_dtype = _TABLE_DTYPE[table.precision]
    if device == "meta":
        indices = torch.empty(n_indices, dtype=torch.int64, device=device)
        offsets = torch.empty(n_bags, dtype=torch.int64, device=device)
        weights = torch.empty(n_indices, dtype=weight_dtype, device=device)
    else:
        drawn = [draw_lengths(mean, batch_size, ragged=table.ragged, rng=rng) for mean in means]
        rows, bags = _draw_members(members, batch_size, rng), torch.cat(drawn)
        if len(members) > 1:
            rows, bags = _by_sample(rows, bags.view(-1, batch_size))
        indices, offsets = rows.to(device), offsets_of(bags).to(device)
        weights = torch.from_numpy(rng.random(n_indices)).to(weight_dtype).to(device)
    return indices, offsets, weights if table.weighted else None


def _draw_members(members: Sequence[Table], batch_size: int, rng: np.random.Generator) -> Tensor:
    """Rows of the joint weight: each table's own rows behind those of the tables before it."""
    drawn, first_row = [], 0
    for table in members:
        n = sum(round(mean * batch_size) for mean in table.pooling_factor)
        drawn.append(draw_indices(table.distribution or Distribution(), table.rows, n, rng) + first_row)
        first_row += table.rows
    return torch.cat(drawn)


def _by_sample(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and bag lengths in the order of samples, from those of (features, batch)."""
    samples = torch.arange(lengths.shape[1]).repeat(lengths.shape[0])
    order = torch.repeat_interleave(samples, lengths.flatten()).argsort(stable=True)
    return rows[order], lengths.T.flatten()


def _access(table: Table, module: nn.Module) -> TableAccess:
    distribution = table.distribution or Distribution()
    parameter = f"sparse_arch.embedding_bags.{table.name}.weight"
    return TableAccess(
        parameter=parameter,
        rows=table.rows,
        dim=int(table.dim or 0),
        pooling_factor=sum(table.pooling_factor),
        zipf_exponent=distribution.zipf,
        histogram=distribution.histogram,
        weighted=table.weighted,
        itemsize_bytes=module.get_parameter(parameter).element_size(),
    )
