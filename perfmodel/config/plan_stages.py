"""The `pipeline` section of a plan: stages over the mesh dimension `pp`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import PositiveCount

V_CHUNKS = 2  # runs of blocks that a rank of ZB-V has


class Pipeline(Spec):
    """Pipeline stages over the mesh dimension `pp`.

    Attributes:
        schedule: `1f1b`, `gpipe`, `interleaved` (1F1B with `chunks` runs of blocks on each rank), `zero_bubble` (ZB-H1:
            gradients of weights fill the bubble), `zero_bubble_h2` (ZB-H2: nearly twice the micro-batches in flight) or
            `zero_bubble_v` (ZB-V: two runs of blocks on each rank, down and up the ranks in a V).
        chunks: runs of blocks a rank has; more than one with `interleaved`, two with `zero_bubble_v`.
        group_size: with `interleaved`, micro-batches that go through one chunk before the next one's turn (Megatron-Core's
            microbatch_group_size_per_virtual_pipeline_stage, N in the paper of Llama 3). Without it as many as stages.
        blocks: blocks of each stage in order (with several chunks, of each chunk in the model's order); spread evenly if not
            given. The first and the last may have none: the embedding alone, the head and the loss alone.
        deallocate_outputs: what a stage has sent on is freed (Megatron-Core's deallocate_pipeline_outputs); without it stages
            hold what those of torch.distributed.pipelining do (`plan/torch_stages.py`).
        host_sync: the host waits for what a stage receives before it issues the pass that needs it, and for the end of each
            pass, as Megatron-LM up to version 2.6 does (`torch.cuda.synchronize` in p2p_communication.py and timers.py).
        scatter_gather: each tensor-parallel rank sends its part of what all of them have, and the receivers gather
            (Megatron-LM's scatter_gather_tensors_in_pipeline, DeepSpeed's pipe_partitioned); with `sequence` parts are all
            that a rank has.
    """

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_h2", "zero_bubble_v"] = "1f1b"
    chunks: PositiveCount = 1
    group_size: PositiveCount | None = None
    blocks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    host_sync: bool = False
    scatter_gather: bool = False
    deallocate_outputs: bool = True

    @property
    def n_chunks(self) -> int:
        """Runs of blocks a rank has."""
        return V_CHUNKS if self.schedule == "zero_bubble_v" else self.chunks

    @model_validator(mode="after")
    def _consistent(self) -> Pipeline:
        fits = {"interleaved": self.chunks > 1, "zero_bubble_v": self.chunks in (1, V_CHUNKS)}
        if not fits.get(self.schedule, self.chunks == 1):
            raise ValueError(
                f"chunks: found {self.chunks} with schedule {self.schedule}, allowed more than 1 with interleaved, "
                f"{V_CHUNKS} with zero_bubble_v and 1 with the others"
            )
        if self.group_size is not None and self.schedule != "interleaved":
            raise ValueError(
                f"group_size: found {self.group_size} with schedule {self.schedule}, allowed with interleaved: other "
                "schedules have one chunk, or an order of their own"
            )
        if self.host_sync and self.schedule == "zero_bubble_v":
            raise ValueError("host_sync: found true with schedule zero_bubble_v, allowed with those of Megatron-LM 2.6")
        if any(count == 0 for count in self.blocks[1:-1]):
            raise ValueError("blocks: found 0 between the first and the last, allowed 0 for those two alone")
        return self
