"""PlanSpec: how a model is spread over ranks. From a plan file, a mapping or inline text (`ddp,bucket_cap=50MiB`).

Only what the plan room can place is accepted; any other key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from perfmodel.config.loading import Source, Spec, list_configs, read_source, validate
from perfmodel.config.plan_fsdp import Fsdp
from perfmodel.config.plan_stages import Pipeline
from perfmodel.config.plan_words import put, value_of, words_of
from perfmodel.config.quantity import Bytes, BytesPerS, PositiveBytes, PositiveCount
from perfmodel.config.reading import check_mapping, parse_mapping
from perfmodel.config.sharding import TablePlacement, read_placement
from perfmodel.errors import ConfigError, suggest
from perfmodel.units import MEBI, parse_bytes_per_s

# torch.nn.parallel.DistributedDataParallel, torch 2.13: bucket_cap_mb=25 and dist._DEFAULT_FIRST_BUCKET_BYTES.
DEFAULT_BUCKET_CAP_BYTES = 25 * MEBI
DEFAULT_FIRST_BUCKET_BYTES = 1 * MEBI

# Ends of module paths in GPT-2, OPT, LLaMA, Mixtral and BERT as Hugging Face names them, and in Megatron-LM.
COLUMN = (
    "attn.c_attn", "mlp.c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1",
    "self.query", "self.key", "self.value", "intermediate.dense", "query_key_value", "linear_qkv", "dense_h_to_4h",
    "linear_fc1", "gate_up_proj", "lora_qkv_up",
)  # fmt: skip
ROW = (
    "attn.c_proj", "mlp.c_proj", "o_proj", "out_proj", "down_proj", "fc2", "output.dense", "self_attention.dense",
    "linear_proj", "dense_4h_to_h", "linear_fc2", "lora_proj_down",
)  # fmt: skip
EXPERTS = ("experts",)
VOCABULARY = ("wte", "embed_tokens", "word_embeddings", "lm_head", "predictions.decoder")

# Outermost first, as Megatron-LM orders ranks (--use-tp-pp-dp-mapping off): tensor groups are neighbours.
MESH_DIMS = ("pp", "dp", "ep", "cp", "tp")
STRATEGIES = ("table_wise", "row_wise", "column_wise", "data_parallel")
Travel = Literal["own", "fp16", "bf16", "fp8", "int8"]
# Sequential and 4 KiB random reads of a PCIe 4.0 x4 data-centre drive: 6.8 GB/s and 1 M/s x 4 KiB (Samsung PM9A3, datasheet
# 2021), over the two ranks that share a drive in a server of 8 GPUs with 4 drives.
DEFAULT_SSD_BYTES_PER_S = parse_bytes_per_s("2 GB/s")


# What one thread (torchrun's default for each rank) reads and writes in torch's fused AdamW: 32 bytes a parameter in 2.60 ns,
# torch 2.13 on one core of an EPYC Zen 4, 33 M parameters, 2026-11-29.
DEFAULT_HOST_BYTES_PER_S = parse_bytes_per_s("12 GB/s")


class DataParallel(Spec):
    """DDP of the dense parameters: gradients in buckets (bytes), all-reduced in the order they become ready.

    With `gradient_as_bucket_view` nothing is copied out of a bucket after its all-reduce. `broadcast_buffers`: buffers of the
    model (running statistics, masks) come from rank 0 before a step, as DDP does by default. `compression`: the type in which
    buckets travel (torch's `fp16_compress_hook`, `bf16_compress_hook`). `static_graph` says that every iteration uses the
    same parameters; steps after the first do the same with it and without. `reduce`: `buckets` during backward, as torch
    does; `after_backward` all at once when backward is done, as Megatron-LM without overlap does.
    `shard`: what of the model's state is divided over replicas instead of copied: `optimizer` (ZeRO 1), `gradients` too
    (ZeRO 2), `parameters` too (ZeRO 3 as torch's FSDP does it, unit by unit: see `Fsdp`).
    `offload`: what is divided lies in the host's memory and the optimizer runs there (FSDP2's CPUOffloadPolicy, ZeRO-Offload);
    `host_memory`: bytes that a rank's thread reads and writes there in a second.
    """

    bucket_cap: PositiveBytes = DEFAULT_BUCKET_CAP_BYTES
    first_bucket: Bytes = DEFAULT_FIRST_BUCKET_BYTES
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    static_graph: bool = False
    compression: Literal["none", "fp16", "bf16"] = "none"
    reduce: Literal["buckets", "after_backward"] = "buckets"
    shard: Literal["nothing", "optimizer", "gradients", "parameters"] = "nothing"
    offload: bool = False
    host_memory: BytesPerS = DEFAULT_HOST_BYTES_PER_S

    @model_validator(mode="after")
    def _consistent(self) -> DataParallel:
        if self.shard != "nothing" and self.reduce != "buckets":
            raise ValueError(f"reduce: found {self.reduce} with shard {self.shard}, allowed buckets")
        if self.offload and self.shard == "nothing":
            raise ValueError(
                "offload: found true with shard nothing, allowed with optimizer, gradients (ZeRO-Offload) or parameters (FSDP)"
            )
        if self.compression != "none" and (self.shard != "nothing" or self.reduce != "buckets"):
            raise ValueError(
                f"compression: found {self.compression} with shard {self.shard} and reduce {self.reduce}, allowed with "
                "shard nothing and reduce buckets: it is a communication hook of DistributedDataParallel"
            )
        return self


class TensorParallel(Spec):
    """Tensor parallelism over the mesh dimension `tp`, by the ends of module paths (patterns as in file names).

    Attributes:
        column: linears whose outputs are split: query, key, value and the first of the feed-forward layer.
        row: linears whose inputs are split: the attention's output and the last of the feed-forward layer.
        vocabulary: the token embedding and the head that gives logits.
        vocabulary_parallel: split those too, with the loss; without it every rank has them whole.
        sequence: split the tokens of norms, dropouts and residuals between the parallel regions.
        async_tp: cut products beside all-gathers and reduce-scatters of tokens, so that both overlap, as torch's
            `_micro_pipeline_tp` does; without it they block.
    """

    column: tuple[str, ...] = COLUMN
    row: tuple[str, ...] = ROW
    vocabulary: tuple[str, ...] = VOCABULARY
    vocabulary_parallel: bool = True
    sequence: bool = False
    async_tp: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TensorParallel:
        if self.async_tp and not self.sequence:
            raise ValueError(
                "async_tp: found true without sequence, allowed with sequence: true: only all-gathers and reduce-scatters of "
                "tokens are cut, all-reduces stay whole"
            )
        return self


class ExpertParallel(Spec):
    """Expert parallelism over the mesh dimension `ep`, whose ranks have samples of their own and share out the experts.

    Attributes:
        experts: ends of the paths of the modules that hold a stack of matrices, one an expert.
        capacity_factor: every expert takes ceil(factor x rows / experts) rows of each rank, empty places filled and the rest
            dropped, as Megatron-LM's --moe-expert-capacity-factor with --moe-pad-expert-input-to-capacity; None: all rows.
        imbalance: rows at the busiest rank of a group over the mean; 1 if the router spreads tokens evenly.
    """

    experts: tuple[str, ...] = EXPERTS
    capacity_factor: Annotated[float, Field(gt=0.0)] | None = None
    imbalance: Annotated[float, Field(ge=1.0)] = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> ExpertParallel:
        if self.capacity_factor is not None and self.imbalance > 1.0:
            found = f"found {self.imbalance} with capacity_factor {self.capacity_factor}"
            raise ValueError(f"imbalance: {found}, allowed one of them: a capacity gives every expert as many rows")
        return self


def _mesh(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    unknown = [
        f"found {name!r}, allowed {', '.join(MESH_DIMS)}{suggest(str(name), MESH_DIMS)}"
        for name in value
        if name not in MESH_DIMS
    ]
    if unknown:
        raise ValueError("; ".join(unknown))
    return value


class EmbeddingPlan(Spec):
    """How embedding tables are spread. What a search finds and what a plan file says are this object.

    `table_wise`: each table whole on one rank, balanced over ranks by what a lookup costs; `row_wise`, `column_wise`: each
    table over all ranks by rows, or by equal column parts of 32 columns or more; `data_parallel`: every rank has all tables;
    `explicit`: `placement` says of each table where its parts lie (`TablePlacement`; a rank alone stands for
    the whole table there, looked up by the model's own operators). A table is named as in the model file, or by its
    parameter.

    Attributes:
        index_exchange: ranks load their own samples and send indices to the tables' owners; without it every rank loads
            the whole global batch's indices of its tables.
        bottom_mlp: the rank that runs a DLRM's bottom MLP for the global batch (None: every rank, for its own samples).
        row_precision, gradient_precision: the type in which looked-up rows and their gradients travel (`own`: that of the
            lookups; of gradients: that of the rows).
        dedup: indices of unpooled tables travel once each (TorchRec's `use_index_dedup`).
        pipeline: `none`; `sparse_dist`: indices of the next batch travel during this one (TorchRec's
            TrainPipelineSparseDist); `prefetch`: missing cache rows of the next batch come during this one, too
            (PrefetchTrainPipelineSparseDist).
        ssd: what one rank's share of an SSD reads and writes, for `key_value` tables.
    """

    strategy: Literal["table_wise", "row_wise", "column_wise", "data_parallel", "explicit"] = "table_wise"
    placement: Mapping[str, Annotated[TablePlacement, BeforeValidator(read_placement)]] = Field(default_factory=dict)
    index_exchange: bool = True
    bottom_mlp: Annotated[int, Field(ge=0)] | None = None
    row_precision: Travel = "own"
    gradient_precision: Travel = "own"
    dedup: bool = False
    pipeline: Literal["none", "sparse_dist", "prefetch"] = "none"
    ssd: BytesPerS = DEFAULT_SSD_BYTES_PER_S


def _embeddings(value: Any) -> Any:
    if isinstance(value, str):
        if value not in STRATEGIES:
            near = suggest(value, STRATEGIES)
            raise ValueError(f"found {value!r}, allowed {', '.join(STRATEGIES)} or a mapping of tables to ranks{near}")
        return {"strategy": value}
    if isinstance(value, Mapping) and not set(value) & set(EmbeddingPlan.model_fields):
        return {"strategy": "explicit", "placement": value}
    if isinstance(value, Mapping) and value.get("placement") and "strategy" not in value:
        return {"strategy": "explicit", **value}
    return value


class PlanSpec(Spec):
    """A plan.

    Attributes:
        mesh: ranks along `pp` (pipeline stages), `dp` (replicas), `ep` (replicas that share out the experts), `cp` (context
            parallel: a ring over the tokens of a sample) and `tp` (tensor parallel), in rank order: the last varies fastest.
            Without `dp` the ranks left over are replicas.
        accumulate: micro-batches per iteration, each of the model's batch size; gradients are reduced after the last
            (`no_sync` before).
        micro_batches: into how many micro-batches the model's batch is divided, of which a pipeline works on several at once.
        recompute: activations computed again in backward instead of kept: `full` of every block, `selective` of the core of
            attention, `activation` of the activation function between a feed-forward layer's linears; without it as the
            model file says.
    """

    name: str = "ddp"
    mesh: Annotated[Mapping[str, PositiveCount], BeforeValidator(_mesh)] = Field(default_factory=dict)
    data_parallel: DataParallel = DataParallel()
    fsdp: Fsdp = Fsdp()
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    pipeline: Pipeline = Pipeline()
    embeddings: Annotated[EmbeddingPlan, BeforeValidator(_embeddings)] = EmbeddingPlan()
    accumulate: PositiveCount = 1
    micro_batches: PositiveCount = 1
    recompute: Literal["full", "selective", "activation"] | None = None

    @property
    def n_micro(self) -> int:
        """Passes through the model per iteration."""
        return self.accumulate * self.micro_batches

    @property
    def is_mesh(self) -> bool:
        """Whether ranks differ in more than the data they see."""
        plain = self.data_parallel.reduce == "buckets" and self.data_parallel.shard == "nothing"
        routed = self.expert_parallel.capacity_factor is not None
        return routed or not plain or any(self.size(dim) > 1 for dim in MESH_DIMS if dim != "dp")

    @property
    def scatter(self) -> str:
        """After what gradients that are divided leave a rank: each `micro_batch`, each `group` of them, or the `step`."""
        if self.data_parallel.shard == "parameters":
            return self.fsdp.scatter or ("micro_batch" if self.size("pp") == 1 else "step")
        return "micro_batch" if self.data_parallel.shard == "gradients" else "step"

    @property
    def sum_group(self) -> int | None:
        """Micro-batches whose gradients are summed before they are scattered; None: all of a step."""
        if self.scatter == "step":
            return None
        return 1 if self.scatter == "micro_batch" else self.pipeline.group_size or self.size("pp")

    def size(self, dim: str) -> int:
        """Ranks along a mesh dimension as the plan names them; 1 if it does not."""
        return self.mesh.get(dim, 1)

    @model_validator(mode="after")
    def _consistent(self) -> PlanSpec:
        if self.accumulate > 1 and self.micro_batches > 1:
            raise ValueError(
                f"accumulate: found {self.accumulate} with micro_batches {self.micro_batches}, allowed one of them"
            )
        shard, schedule = self.data_parallel.shard, self.pipeline.schedule
        if shard == "gradients" and self.size("pp") > 1:
            self._check_zero_2_stages()
        if self.fsdp.scatter == "group" and schedule != "interleaved":
            raise ValueError(
                f"fsdp.scatter: found group with schedule {schedule}, allowed with interleaved: other schedules "
                "have no groups of micro-batches"
            )
        if shard != "parameters" and self.fsdp != Fsdp():
            raise ValueError(f"fsdp: found with data_parallel.shard {shard}, allowed with parameters")
        if self.expert_parallel.imbalance > 1.0 and self.size("ep") == 1:
            raise ValueError(
                f"expert_parallel.imbalance: found {self.expert_parallel.imbalance} without mesh.ep, allowed with 2 or more: "
                "a rank with all experts works on all rows"
            )
        if schedule not in ("1f1b", "gpipe") and self.size("pp") == 1:
            raise ValueError(f"pipeline.schedule: found {schedule} with one stage, allowed with mesh.pp of 2 or more")
        return self

    def _check_zero_2_stages(self) -> None:
        """Megatron-FSDP's `optim_grads` alone has ZeRO 2 with stages, and Megatron-Core runs it."""
        if self.pipeline.schedule not in ("1f1b", "interleaved"):
            raise ValueError(
                f"data_parallel.shard: found gradients with {self.size('pp')} stages and schedule {self.pipeline.schedule}, "
                "allowed with 1f1b and interleaved: they are what Megatron-Core runs Megatron-FSDP's optim_grads under, and "
                "DeepSpeed refuses ZeRO 2 with stages"
            )
        if self.data_parallel.offload:
            raise ValueError(
                f"data_parallel.offload: found true with shard gradients and {self.size('pp')} stages, allowed with shard "
                "optimizer or parameters: DeepSpeed, whose ZeRO-Offload it is, refuses ZeRO 2 with stages"
            )


# Names that mean a plan without a file.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"name": "ddp"},
    "zero1": {"name": "zero1", "data_parallel": {"shard": "optimizer"}},
    "zero2": {"name": "zero2", "data_parallel": {"shard": "gradients"}},
    "fsdp": {"name": "fsdp", "data_parallel": {"shard": "parameters"}},
    "fsdp1": {"name": "fsdp1", "data_parallel": {"shard": "parameters"}, "fsdp": {"version": 1}},
}
# Inline keys that stand for a key inside a section.
_SHORT = {
    **dict.fromkeys((*DataParallel.model_fields,), "data_parallel"),
    **dict.fromkeys(("reshard_after_forward", "backward_prefetch", "forward_prefetch", "scatter"), "fsdp"),
    **dict.fromkeys(("sequence", "vocabulary_parallel", "async_tp"), "tensor_parallel"),
    **dict.fromkeys(("schedule", "chunks", "group_size"), "pipeline"),
    **dict.fromkeys(("capacity_factor", "imbalance"), "expert_parallel"),
    **dict.fromkeys(MESH_DIMS, "mesh"),
}


def plan_keys() -> tuple[str, ...]:
    """The keys that inline plans may name without a section."""
    return (*_SHORT, *(name for name in PlanSpec.model_fields if name not in ("name", "mesh")))


def is_plan_key(key: str) -> bool:
    """Whether an inline plan may name this key: a short one, one of a plan's own, or one inside a section."""
    section, dot, _ = key.partition(".")
    return key in plan_keys() or (bool(dot) and section in PlanSpec.model_fields)


def load_plan(source: Source = "ddp") -> PlanSpec:
    """The plan in a shipped config, a file, a mapping or inline text (`ddp,bucket_cap=50MiB`, `embeddings=table_wise`).

    Inline text is a comma-separated list: first a plan's name or file if any, then `key=value`, where a value may be a YAML
    flow mapping or list (`embeddings={t0: 0, t1: 1}`); or all of it is a flow mapping with the keys of a file
    (`{embeddings: {t0: 0}}`). Raises ConfigError.
    """
    if isinstance(source, str) and source.startswith("{"):
        where = f"plan {source!r}"
        return validate(PlanSpec, {"name": source, **parse_mapping(source, where)}, where)
    if isinstance(source, str) and (source in BUILT_IN or "=" in source or "," in source):
        return validate(PlanSpec, _inline(source), f"plan {source!r}")
    where, mapping = read_source("plans", source)
    if not isinstance(source, Mapping):
        mapping = {"name": Path(where).stem, **mapping}
    return validate(PlanSpec, mapping, where)


def _inline(text: str) -> dict[str, Any]:
    where = f"plan {text!r}"
    words = words_of(text)
    base: dict[str, Any] = {}
    if "=" not in words[0]:
        base = _base(words.pop(0))
    problems = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            problems.append(f"{where}: found {word!r}, allowed key=value")
            continue
        path = [_SHORT[key], key] if key in _SHORT else key.split(".")
        put(base, path, value_of(value, where))
    if problems:
        raise ConfigError(problems)
    if isinstance(base.get("mesh"), Mapping):  # the order of words in a line says nothing
        base["mesh"] = {dim: base["mesh"][dim] for dim in (*MESH_DIMS, *base["mesh"]) if dim in base["mesh"]}
    return check_mapping({"name": text, **base}, where)


def _base(name: str) -> dict[str, Any]:
    if name in BUILT_IN:
        return dict(BUILT_IN[name])
    if name in list_configs("plans") or Path(name).is_file():
        return read_source("plans", name)[1]
    known = [*BUILT_IN, *list_configs("plans")]
    raise ConfigError(f"plan {name!r}: no such plan, allowed {', '.join(known)} or key=value{suggest(name, known)}")
