"""What a rank holds under torch.distributed.pipelining, beside what Megatron-LM's schedules hold.

Read from torch 2.13 (`pipelining/stage.py`, `schedules.py`), the same on every device. A stage receives into buffers that it
makes once, of each micro-batch: its inputs and the gradients of its outputs (`args_recv_info`, `grad_recv_info`). What it has
sent on stays until its backward is over (`fwd_cache`). The last stage keeps the outputs of all micro-batches
(`output_chunks`), even detached, until the next step begins, and joins them (`_merge_outputs`). Gradients are autograd's:
the first micro-batch's backward makes them one by one, later ones add to them, each in memory of its own until it is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from perfmodel.graph import Graph
from perfmodel.plan.holding import Holding
from perfmodel.plan.schedule import PARTED
from perfmodel.plan.spread import Chunk, Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPasses:
    """Bytes of a chunk's passes of one micro-batch alone, without what it receives.

    `kept_bytes`: what forward leaves for backward without the chunk's output; `forward_bytes`, `first_bytes`, `later_bytes`:
    peaks of forward, of the backward that makes the gradients, and of one that adds to them (less those that are there),
    without the model's output.
    """

    kept_bytes: int
    output_bytes: int
    gradients_bytes: int
    forward_bytes: int
    first_bytes: int
    later_bytes: int


def is_torch(spread: Spread) -> bool:
    """Whether the stages of a plan are torch.distributed.pipelining's, with schedules whose backward is one pass."""
    pipeline = spread.plan.pipeline
    return spread.n_stages > 1 and not pipeline.deallocate_outputs and pipeline.schedule not in PARTED


def makes_gradients(spread: Spread) -> bool:
    """Whether gradients are autograd's own: not divided, and not views of buckets that stay."""
    ddp = spread.plan.data_parallel
    views = spread.n_shards > 1 and (ddp.gradient_as_bucket_view or ddp.reduce != "buckets")
    return is_torch(spread) and ddp.shard == "nothing" and not views


def as_torch_holds(holding: Holding, spread: Spread, stage: int) -> Holding:
    """The holding of a rank's stage with the buffers and outputs of torch's implementation."""
    n_micro, virtuals = spread.plan.n_micro, [spread.virtual(stage, chunk) for chunk in range(spread.n_chunks)]
    passes = [passes_of(chunk) for chunk in spread.chunks(stage)]
    is_last = [virtual == len(spread.parts) - 1 for virtual in virtuals]
    outputs = tuple(p.output_bytes * last for p, last in zip(passes, is_last, strict=True))
    holding = replace(
        holding,
        kept_bytes=tuple(p.kept_bytes + p.output_bytes * (not last) for p, last in zip(passes, is_last, strict=True)),
        outputs_bytes=outputs,
        always_bytes=n_micro * sum(received_bytes(spread, virtual) for virtual in virtuals),
        joined_bytes=n_micro * sum(outputs),
    )
    if not makes_gradients(spread):
        return holding
    return replace(
        holding,
        summed_bytes=tuple(p.gradients_bytes for p in passes),
        sum_group=None,
        above_by_step=tuple(_above(passes[step.chunk], step.kind, first=step.micro == 0) for step in holding.steps),
    )


def _above(passes: ChunkPasses, kind: str, *, first: bool) -> int:
    """What a step needs beyond what is kept; less the gradients that its backward has yet to make."""
    if kind == "forward":
        return passes.forward_bytes - passes.kept_bytes
    if first:
        return passes.first_bytes - passes.kept_bytes - passes.gradients_bytes
    return passes.later_bytes - passes.kept_bytes


def received_bytes(spread: Spread, virtual: int) -> int:
    """Bytes that a part of the model receives in one micro-batch: its input, and the gradient of its output."""
    inputs = spread.parts[virtual - 1].stage.forward_bytes if virtual > 0 else 0
    gradients = spread.parts[virtual + 1].stage.backward_bytes if virtual + 1 < len(spread.parts) else 0
    return inputs + gradients


def passes_of(chunk: Chunk) -> ChunkPasses:
    """Peaks of a chunk's passes, found once."""
    return chunk.facts.derived("torch passes", lambda: _passes_of(chunk.graph, chunk.stage.forward_bytes))


def _passes_of(graph: Graph, sent_bytes: int) -> ChunkPasses:
    ops = graph.ops
    border = next((i for i, op in enumerate(ops) if op.phase == "backward"), len(ops))
    start = next((i for i, op in enumerate(ops) if op.phase == "optimizer"), len(ops))
    output = None if sent_bytes else _output(graph)
    made = {spec.storage for op in ops[:start] for spec in op.outputs}
    own = [
        s
        for s in graph.storages
        if s.born < start and s.id != output and (s.kind == "input" or (s.kind == "activation" and s.id in made))
    ]
    gradients = [s for s in graph.storages if s.kind == "gradient" and s.born < start]
    activations = [(s.bytes, s.born, s.dies) for s in own]
    alone = _live(activations, start)
    first = _live([*activations, *((s.bytes, s.born, start) for s in gradients)], start)
    later = _live([*activations, *((s.bytes, s.born, s.born) for s in gradients)], start)
    return ChunkPasses(
        kept_bytes=sum(s.bytes for s in own if s.born < border <= s.dies),
        output_bytes=sent_bytes or sum(s.bytes for s in graph.storages if s.id == output),
        gradients_bytes=sum(s.bytes for s in gradients),
        forward_bytes=max(alone[:border], default=0),
        first_bytes=max(first[border:], default=0),
        later_bytes=max(later[border:], default=0),
    )


def _output(graph: Graph) -> int | None:
    """The storage of what the model returns: the last that forward makes and the loss reads."""
    read = {spec.storage for op in graph.ops if op.phase == "loss" for spec in op.inputs}
    made = [spec.storage for op in graph.ops if op.phase == "forward" for spec in op.outputs if spec.storage in read]
    return made[-1] if made else None


def _live(lives: list[tuple[int, int, int]], n_ops: int) -> list[int]:
    """Bytes after each op, of (bytes, born, dies)."""
    change = [0] * (n_ops + 1)
    for size, born, dies in lives:
        change[min(max(born, 0), n_ops)] += size
        change[min(dies + 1, n_ops)] -= size
    return list(accumulate(change))[:n_ops]
