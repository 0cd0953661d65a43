"""DLRM specs: dense features through a bottom MLP, pooled embedding tables, an interaction, a top MLP."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import PositiveCount
from perfmodel.config.training import SparseOptimizer, SparseOptimizerField, TrainedSpec
from perfmodel.errors import suggest

Positive = Annotated[float, Field(gt=0.0)]
DISTRIBUTIONS = ("uniform", "zipf", "histogram")


class Distribution(Spec):
    """Which rows a table's indices hit. Exactly one of the two is given, or neither (uniform).

    `zipf`: exponent of a power law over the rows. `histogram`: pairs (number of rows, accesses per iteration and row).
    """

    zipf: Annotated[float, Field(ge=0.0, le=4.0)] = 0.0
    histogram: tuple[tuple[Positive, Positive], ...] = ()

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Distribution:
        if self.zipf and self.histogram:
            raise ValueError("found zipf and histogram, allowed one of them")
        return self


def _distribution(value: Any) -> Any:
    if value == "uniform":
        return {}
    if isinstance(value, str):
        near = suggest(value, DISTRIBUTIONS)
        raise ValueError(f"found {value!r}, allowed uniform, {{zipf: EXPONENT}} or {{histogram: PAIRS}}{near}")
    return value


DistributionField = Annotated[Distribution, BeforeValidator(_distribution)]


def _features(value: Any) -> Any:
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Table(Spec):
    """One embedding table, or `count` equal ones.

    Attributes:
        rows, dim: size of the table; `dim` defaults to the model's `embedding_dim`.
        pooling_factor: mean indices per sample; a list means that several features share the table, one entry for each.
        ragged: bag lengths vary around the mean instead of being equal.
        weighted: each index has a per-sample weight.
        distribution: which rows are hit; defaults to the model's `distribution`.
        precision: element type of the stored rows.
    """

    rows: PositiveCount = Field(description="the number of rows, a whole number")
    dim: PositiveCount | None = None
    name: str | None = None
    count: PositiveCount = 1
    pooling_factor: Annotated[tuple[Positive, ...], BeforeValidator(_features), Field(min_length=1)] = (1.0,)
    ragged: bool = False
    weighted: bool = False
    distribution: DistributionField | None = None
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"


def _rows_only(value: Any) -> Any:
    return {"rows": value} if isinstance(value, int | str) and not isinstance(value, bool) else value


class Interaction(Spec):
    """How dense and embedded features meet.

    `dot`: pairwise dot products of all vectors, below the diagonal (Naumov et al. 2019, arXiv:1906.00091). `cat`:
    concatenation. `dcnv2`: `layers` low-rank cross layers of rank `rank` on the concatenation (Wang et al. 2021,
    arXiv:2008.13535). `pad_to_multiple` widens the result with zeros so that the top MLP's first gemm is aligned.
    `fused`: `dot` runs as one kernel, padding included (NVIDIA DeepLearningExamples, dlrm/cuda_src/dot_based_interact),
    instead of concatenation, batched gemm, gather and concatenation. `dense_from_stack`: the fused kernel takes the dense
    vector as a slice of the stacked ones, as where they came together from an all-to-all (dlrm/model/distributed.py), and
    backward adds its gradient to theirs.
    """

    kind: Literal["dot", "cat", "dcnv2"] = "dot"
    layers: PositiveCount = 3
    rank: PositiveCount = 512
    pad_to_multiple: PositiveCount = 1
    fused: bool = False
    dense_from_stack: bool = False

    @model_validator(mode="after")
    def _fusable(self) -> Interaction:
        if self.fused and self.kind != "dot":
            raise ValueError(f"fused: found with {self.kind}, allowed with dot")
        if self.dense_from_stack and not self.fused:
            raise ValueError("dense_from_stack: found without fused, allowed with it")
        return self


def _interaction(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class DlrmSpec(TrainedSpec):
    """A deep learning recommendation model. `top_mlp` ends with the output (1 for a click probability).

    `joint`: groups of tables that one operator looks up over one weight, their rows one after another, as the joint
    embeddings of NVIDIA DeepLearningExamples do (PyTorch/Recommendation/DLRM, dlrm/nn/embeddings.py); `all` is one group.
    Indices are taken to name rows of the joint weight already. A plan places a group whole: group g is the table `joint{g}`.

    `lookup`: `bag`, `nn.EmbeddingBag`; `gather`, one row a feature by a kernel that returns fp32 rows, cast where training
    computes in another type; `fused_gather`, by one that returns rows in that type at once (both of that repository,
    dlrm/cuda_src/sparse_gather and gather_gpu_fused.cu; on several GPUs and on one).
    `mlp`: `torch`, a module a layer; `apex`, `apex.mlp.MLP`, all layers with ReLU in one call (not the last of the top).
    `weights`: `fp32`; `fp16`, apex's O2: dense parameters and activations in 16 bits without autocast and without scaling of
    the loss, tables in theirs (the fp32 copies that apex updates beside are left out: 2.4 million parameters).
    """

    kind: Literal["dlrm"] = "dlrm"
    dense_features: PositiveCount = Field(description="the number of dense inputs, a whole number")
    bottom_mlp: tuple[PositiveCount, ...] = Field(min_length=1, description="a list of layer widths")
    top_mlp: tuple[PositiveCount, ...] = Field(min_length=1, description="a list of layer widths")
    embedding_dim: PositiveCount | None = None
    distribution: DistributionField = Distribution()
    tables: tuple[Annotated[Table, BeforeValidator(_rows_only)], ...] = Field(
        min_length=1, description="a list of tables"
    )
    joint: Literal["all"] | tuple[tuple[str, ...], ...] = ()
    lookup: Literal["bag", "gather", "fused_gather"] = "bag"
    mlp: Literal["torch", "apex"] = "torch"
    weights: Literal["fp32", "fp16"] = "fp32"
    interaction: Annotated[Interaction, BeforeValidator(_interaction)] = Interaction()
    sparse_optimizer: SparseOptimizerField = SparseOptimizer(name="sgd")

    @property
    def expanded_tables(self) -> tuple[Table, ...]:
        """One `Table` a table: `count` spelled out; names, dims and distributions filled in."""
        found: list[Table] = []
        for table in self.tables:
            for copy in range(table.count):
                name = table.name or f"t{len(found)}"
                if table.count > 1 and table.name:
                    name = f"{table.name}_{copy}"
                update = {"name": name, "count": 1, "dim": table.dim or self.embedding_dim}
                update["distribution"] = table.distribution or self.distribution
                found.append(table.model_copy(update=update))
        return tuple(found)

    @property
    def lookups(self) -> tuple[tuple[str, tuple[Table, ...]], ...]:
        """Name and tables of each lookup: the groups of `joint`, then the tables that are in none of them."""
        tables = {str(table.name): table for table in self.expanded_tables}
        groups = (tuple(tables),) if self.joint == "all" else self.joint
        grouped = {name for group in groups for name in group}
        found = [(f"joint{g}", tuple(tables[name] for name in group)) for g, group in enumerate(groups)]
        return (*found, *((name, (table,)) for name, table in tables.items() if name not in grouped))

    @model_validator(mode="after")
    def _consistent(self) -> DlrmSpec:
        tables = self.expanded_tables
        problems = [
            f"tables.{table.name}: no dim, and the model has no embedding_dim" for table in tables if table.dim is None
        ]
        names = Counter(str(table.name) for table in tables)
        problems += [f"tables: {n} tables are called {name!r}" for name, n in names.items() if n > 1]
        problems += [
            f"tables.{name}: found a dot in the name, allowed none (the name becomes part of a parameter's name)"
            for name in names
            if "." in name
        ]
        if self.interaction.kind == "dot" and not problems:
            problems += self._dims_for_dot(tables)
        if self.joint and not problems:
            problems += self._joint_problems(tables)
        problems += self._operator_problems(tables)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _dims_for_dot(self, tables: tuple[Table, ...]) -> list[str]:
        dims = sorted({int(table.dim or 0) for table in tables} | {self.bottom_mlp[-1]})
        if len(dims) == 1:
            return []
        return [f"interaction: dot needs one width for all tables and the last bottom_mlp layer, found {dims}"]

    def _operator_problems(self, tables: tuple[Table, ...]) -> list[str]:
        """A gather takes one index a feature; apex's MLP has a layer below the output; O2 is mixed precision."""
        problems = []
        if self.lookup != "bag":
            problems += [
                f"tables.{t.name}: found lookup {self.lookup} with bags, allowed one index a feature (pooling_factor 1, "
                "not ragged, not weighted)"
                for t in tables
                if t.ragged or t.weighted or any(mean != 1.0 for mean in t.pooling_factor)
            ]
        if self.mlp == "apex" and len(self.top_mlp) < 2:
            problems.append(f"mlp: found apex with a top_mlp of {len(self.top_mlp)} layer, allowed 2 or more")
        if self.weights == "fp16" and self.precision != "amp_fp16":
            problems.append(f"weights: found fp16 with precision {self.precision}, allowed with amp_fp16")
        return problems

    def _joint_problems(self, tables: tuple[Table, ...]) -> list[str]:
        """Tables of a group have one width, row type and kind of bag; no table is in two groups."""
        known = {str(table.name): table for table in tables}
        groups = (tuple(known),) if self.joint == "all" else self.joint
        named = Counter(name for group in groups for name in group)
        problems = [f"joint: found {n!r}, allowed a table's name{suggest(n, known)}" for n in named if n not in known]
        problems += [f"joint: found {name!r} {n} times, allowed once" for name, n in named.items() if n > 1]
        problems += [
            f"joint: found an empty group {g}, allowed one table or more" for g, names in enumerate(groups) if not names
        ]
        taken = [name for name in known if name not in named and name in {f"joint{g}" for g in range(len(groups))}]
        problems += [f"joint: found a table called {name!r}, allowed another name (a group has it)" for name in taken]
        for g, names in enumerate(groups):
            kinds = {(t.dim, t.precision, t.ragged, t.weighted) for t in map(known.get, names) if t is not None}
            if len(kinds) > 1:
                problems.append(
                    f"joint: found {len(kinds)} kinds of tables in group {g}, allowed one (dim, precision, ragged, weighted)"
                )
        return problems
