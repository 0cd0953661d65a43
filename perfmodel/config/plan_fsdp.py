"""The `fsdp` section of a plan: how parameters are divided with `data_parallel.shard: parameters`."""

from __future__ import annotations

from typing import Literal

from perfmodel.config.loading import Spec
from perfmodel.config.quantity import PositiveCount


class Fsdp(Spec):
    """How parameters are divided with `data_parallel.shard: parameters`.

    Attributes:
        version: 2 for `fully_shard` (each parameter divided by its first dimension), 1 for `FullyShardedDataParallel` (the
            parameters of a unit in one flat tensor: nothing is copied out of a gathered unit, gradients are divided by the
            number of ranks before they are reduced).
        wrap: ends of the paths of the modules that are a unit each (patterns as in file names); the model's blocks if none.
        reshard_after_forward: free a unit after forward and gather it again in backward; the rest always stays.
        backward_prefetch: ask for the next unit of backward before the gradients of the one before it are computed (`pre`),
            after (`post`), or when it is needed (`none`).
        forward_prefetch: ask for the next unit of forward before the one before it runs.
        ranks: over how many neighbouring replicas states are divided; groups of so many hold copies (hybrid sharding:
            the GPUs of a node). All replicas if not given.
        reduce_dtype: the type in which gradients are summed and scattered: `own` of the parameters, or `fp32` whatever theirs
            is (the reduce_dtype of FSDP's mixed-precision policies; torchtitan's default, and that of Llama 3).
        scatter: when gradients are summed over replicas and scattered: after every `micro_batch` (FSDP's own way), once a
            `step` (`no_sync`, or `set_requires_gradient_sync(False)` until the last; whole gradients are held until then), or
            after each `group` of an interleaved schedule's micro-batches through a run of blocks. Not given: `micro_batch`
            with one stage, `step` with several, as torch.distributed.pipelining does.
    """

    version: Literal[1, 2] = 2
    wrap: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    backward_prefetch: Literal["pre", "post", "none"] = "pre"
    forward_prefetch: bool = False
    ranks: PositiveCount | None = None
    reduce_dtype: Literal["own", "fp32"] = "own"
    scatter: Literal["micro_batch", "group", "step"] | None = None
