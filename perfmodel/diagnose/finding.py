"""A finding: one cause of low utilisation, with its evidence, its fix and the predicted gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["computation", "interruption", "distributed", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A class of causes known from field studies: its id, its group, what it is, and the PyTorch change that mends it."""

    id: str
    group: Group
    title: str
    fix: str


CAUSES: dict[str, Cause] = {
    cause.id: cause
    for cause in (
        Cause(id="small_batch", group="computation", title="kernels too small to fill the device",
              fix="raise the batch per rank (with gradient accumulation lowered by as much), and scale the learning rate"),
        Cause(id="tiny_kernels", group="computation", title="many tiny pointwise kernels",
              fix="model = torch.compile(model): chains of pointwise ops become one kernel each"),
        Cause(id="launch_bound", group="computation", title="the device waits for the host to issue kernels",
              fix='torch.compile(model, mode="reduce-overhead"), or torch.cuda.make_graphed_callables: CUDA graphs'),
        Cause(id="low_occupancy", group="computation", title="memory-bound kernels with few warps in flight",
              fix="use PyTorch's or Triton's generated kernel in place of the custom one, or launch it with smaller "
                  "blocks and fewer registers (__launch_bounds__)"),
        Cause(id="wrong_precision", group="computation", title="matrix arithmetic in a wider type than needed",
              fix="with torch.autocast(device_type, dtype=torch.bfloat16): around forward and loss (float16 with "
                  "GradScaler before Ampere); keep tensors float32, not float64, elsewhere"),
        Cause(id="unused_tensor_cores", group="computation", title="FP32 products run without tensor cores",
              fix='torch.set_float32_matmul_precision("high") and torch.backends.cudnn.allow_tf32 = True'),
        Cause(id="unaligned_shapes", group="computation", title="matrix sizes that tensor cores do not divide",
              fix="pad vocabulary, hidden and batch sizes to multiples of 8 (16-bit) or 4 (TF32), better of 64"),
        Cause(id="data_loading", group="interruption", title="the step waits for the data loader",
              fix="DataLoader(..., num_workers=4, pin_memory=True, persistent_workers=True, prefetch_factor=4)"),
        Cause(id="preprocessing", group="interruption", title="preprocessing on the training thread",
              fix="move it into Dataset.__getitem__ or collate_fn (run by workers), or do it once before training"),
        Cause(id="pageable_copies", group="interruption", title="batches copied from pageable memory",
              fix="DataLoader(pin_memory=True) and batch.to(device, non_blocking=True)"),
        Cause(id="synchronisation", group="interruption", title="the host waits for the device inside the step",
              fix="keep values on the device: no .item(), .cpu(), print(tensor), nonzero or boolean masks in the step; "
                  "read losses every N steps"),
        Cause(id="logging", group="interruption", title="logging inside the step",
              fix="log every N steps, from a detached copy made with non_blocking=True"),
        Cause(id="checkpointing", group="interruption", title="checkpoints written while training waits",
              fix="torch.distributed.checkpoint.async_save, or copy to host memory and write from a thread; save more rarely"),
        Cause(id="evaluation", group="interruption", title="evaluation inside the training loop",
              fix="evaluate ten times more rarely, or in a job of its own from a checkpoint"),
        Cause(id="host_optimizer", group="interruption", title="the optimizer's step is host-bound or on the CPU",
              fix="optimizer(..., fused=True), or foreach=True; parameters and states on the training device"),
        Cause(id="load_imbalance", group="distributed", title="ranks have unequal work",
              fix="even out what ranks get: sort or bucket samples by length, or re-plan tables (perfmodel shard)"),
        Cause(id="straggler", group="distributed", title="one rank is slower at the same work",
              fix="take the node out, or see to its clocks, its cooling and what else runs on its CPUs"),
        Cause(id="exposed_communication", group="distributed", title="communication that nothing hides",
              fix="overlap it: DDP(bucket_cap_mb=25, gradient_as_bucket_view=True), FSDP prefetch; no_sync() when "
                  "accumulating; compress gradients to 16 bits"),
        Cause(id="small_buckets", group="distributed", title="gradients reduced in many small messages",
              fix="DDP(bucket_cap_mb=25) or more"),
        Cause(id="slow_links", group="distributed", title="large messages far below what the links carry",
              fix="check with nccl-tests and NCCL_DEBUG=INFO: P2P disabled, no GPUDirect RDMA, wrong NCCL_SOCKET_IFNAME"),
        Cause(id="cache_flush", group="memory", title="the allocator's cache is emptied in the step",
              fix="remove torch.cuda.empty_cache() and gc.collect() from the loop"),
        Cause(id="allocation_retries", group="memory", title="the allocator frees and asks again (fragmentation)",
              fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; keep shapes equal; leave a tenth of the memory free"),
        Cause(id="recompute", group="memory", title="activations are recomputed in backward",
              fix="checkpoint fewer blocks (selective activation checkpointing) where memory allows"),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where it shows: rank, and start and end in the rank's trace (s)."""

    rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that was found.

    `evidence` says in words what shows it; `intervals` where (the longest few); `ops` and `modules` whose. `gain_s` is what a
    step gets shorter by with the fix, simulated (per sample where the batch changes); `basis` says how it was found.
    """

    cause: Cause
    evidence: str
    intervals: tuple[Interval, ...]
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    gain_s: float
    step_s: float
    basis: str

    @property
    def gain_frac(self) -> float:
        """Gain as a share of the step."""
        return self.gain_s / self.step_s if self.step_s > 0 else 0.0
