"""Made-up traces of a training run: a healthy one, and the same with one thing wrong. Ranks run in lockstep at collectives.

Times in microseconds. The host issues ops one after another; a kernel starts when it is launched and its stream is free; a
collective ends on all ranks together, `transfer` after the last has come.
"""

import json
from dataclasses import dataclass, field

BIG = {"grid": [2160, 1, 1], "block": [256, 1, 1], "registers per thread": 64, "est. achieved occupancy %": 50}
M, K, N = 8192, 4096, 4096
MAIN, AUTOGRAD = 1, 2


@dataclass
class Rank:
    rank: int
    slower: float = 1.0
    now: float = 0.0
    events: list = field(default_factory=list)
    free: dict = field(default_factory=dict)
    correlation: int = 0

    def add(self, cat, name, begin, end, tid=MAIN, pid=100, **args):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin, "args": args}
        )

    def launch(
        self, name, duration, stream=7, cat="kernel", *, call="cudaLaunchKernel", blocks=False, tid=MAIN, **args
    ):
        """A call of 5 us and its work; a blocking call lasts until the work has ended."""
        self.correlation += 1
        begin = self.now
        start = max(begin + 7, self.free.get(stream, 0.0))
        end = start + duration * (self.slower if cat == "kernel" else 1.0)
        self.free[stream] = end
        self.now = end + 4 if blocks else begin + 5
        self.add("cuda_runtime", call, begin, self.now, tid, correlation=self.correlation)
        place = {"stream": stream, "device": 0, "correlation": self.correlation}
        self.add(cat, name, start, end, stream, 0, **place, **args)
        return start

    def op(self, name, *kernels, host=8.0, tid=MAIN, inner=None, **args):
        """An op: some host time, then its kernels (name, duration, arguments)."""
        begin = self.now
        self.now += host
        for kernel, duration, more in kernels:
            self.launch(kernel, duration, tid=tid, **more)
        if inner:
            inner()
        self.add("cpu_op", name, begin, self.now + 1, tid, **args)
        self.now += 2

    def span(self, name, duration, cat="user_annotation"):
        self.add(cat, name, self.now, self.now + duration)
        self.now += duration

    def after(self, stream, other, tid=MAIN):
        """What is launched next on a stream waits for what is on another now."""
        self.add("cuda_runtime", "cudaStreamWaitEvent", self.now, self.now + 1, tid)
        self.now += 1.5
        self.free[stream] = max(self.free.get(stream, 0.0), self.free.get(other, 0.0))

    def wait(self):
        """Waits for all streams."""
        begin = self.now
        self.now = max(self.now, *self.free.values()) + 3
        self.add("cuda_runtime", "cudaDeviceSynchronize", begin, self.now, correlation=0)


@dataclass
class Run:
    """What a run is made of; each keyword of a case changes one of these."""

    layers: int = 10
    n_ranks: int = 1
    product: str = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn"
    product_us: float = 1500.0
    dtype: str = "c10::BFloat16"
    n: int = N
    launch: dict = field(default_factory=lambda: dict(BIG))
    pointwise: tuple = (("vectorized_elementwise_kernel", 100.0),)
    pointwise_launch: dict = field(default_factory=lambda: dict(BIG))
    host_us: float = 8.0
    buckets: tuple = ((25_000_000, 300.0),) * 3
    late_buckets: tuple = ()
    slower: tuple = ()
    more_layers: dict = field(default_factory=dict)
    loading_us: float = 20.0
    copy: str = "Memcpy HtoD (Pinned -> Device)"
    copy_us: float = 50.0
    before: object = None  # extra things, called with the rank
    after_layer: object = None
    in_backward: object = None
    optimizer: object = None
    shapes: bool = True
    steps: int = 3


def build(**changes):
    """The traces of all ranks, as documents."""
    run = Run(**changes)
    slower = dict(run.slower)
    ranks = [Rank(rank, slower.get(rank, 1.0)) for rank in range(run.n_ranks)]
    for step in range(run.steps):
        begins = [rank.now for rank in ranks]
        for rank in ranks:
            forward(rank, run)
        backward(ranks, run)
        for rank in ranks:
            rank.after(7, 20)  # the optimizer waits for gradients
            (run.optimizer or fused)(rank)
            rank.wait()
            rank.add("user_annotation", f"ProfilerStep#{step}", begins[rank.rank], rank.now)
            rank.now += 5
    return [document(rank, run.n_ranks) for rank in ranks]


def document(rank, n_ranks):
    return {
        "distributedInfo": {"rank": rank.rank, "world_size": n_ranks},
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-40GB", "numSms": 108, "totalGlobalMem": 42505273344}],
        "traceEvents": rank.events,
    }


def shapes(run):
    return {"Input Dims": [[run.n], [M, K], [K, run.n]], "Input type": [run.dtype] * 3} if run.shapes else {}


def layer(rank, run, tid=MAIN):
    product = (run.product, run.product_us, run.launch)
    rank.op("aten::addmm", product, host=run.host_us, tid=tid, **shapes(run))
    for name, duration in run.pointwise:
        dims = {"Input Dims": [[4096, 4096]], "Input type": [run.dtype]}
        rank.op("aten::relu", (name, duration, run.pointwise_launch), host=run.host_us, tid=tid, **dims)


def forward(rank, run):
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    if run.loading_us > 1000:
        loader = loader.replace("MultiProcessing", "SingleProcess")
    rank.span(loader, run.loading_us)
    if run.before:
        run.before(rank)
    pageable = "Pageable" in run.copy
    rank.op("aten::copy_", host=5, inner=lambda: rank.launch(
        run.copy, run.copy_us, 8, "gpu_memcpy", call="cudaMemcpyAsync", blocks=pageable, bytes=1_000_000))  # fmt: skip
    rank.after(7, 8)
    for _ in range(run.layers + run.more_layers.get(rank.rank, 0)):
        layer(rank, run)
        if run.after_layer:
            run.after_layer(rank)


def backward(ranks, run):
    every = max(run.layers // max(len(run.buckets), 1), 1)
    buckets = list(run.buckets)
    for number in range(run.layers):
        for rank in ranks:
            begin = rank.now
            layer(rank, run, AUTOGRAD)
            if run.in_backward:
                run.in_backward(rank)
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            rank.add("cpu_op", name, begin, rank.now, AUTOGRAD)
            rank.now += 1
        while buckets and (number % every == 0 or number == run.layers - 1):
            reduce(ranks, *buckets.pop())
            if len(buckets) * every <= (run.layers - number) * 1:
                break
    for bucket in (*buckets, *run.late_buckets):
        for rank in ranks:
            rank.after(20, 7, AUTOGRAD)
        reduce(ranks, *bucket)


def reduce(ranks, n_bytes, transfer):
    members = list(range(len(ranks) if len(ranks) > 1 else 8))
    more = {
        "Collective name": "allreduce", "In msg nelems": n_bytes // 4, "Out msg nelems": n_bytes // 4, "dtype": "Float",
        "Group size": len(members), "Process Group Ranks": str(members),
    }  # fmt: skip
    for rank in ranks:
        rank.free[20] = max(rank.free.get(20, 0.0), rank.now)
    starts = []
    for rank in ranks:
        begin = rank.now
        starts.append(rank.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0.0, 20, tid=AUTOGRAD, **more))
        rank.add("cpu_op", "nccl:all_reduce", begin, rank.now, AUTOGRAD)
    end = max(starts) + transfer
    for rank, start in zip(ranks, starts, strict=True):
        rank.free[20] = end
        rank.events[-2]["dur"] = end - start


def fused(rank):
    begin = rank.now
    kernel = ("multi_tensor_apply_kernel", 300.0, dict(BIG))
    rank.op("aten::_fused_adamw_", kernel, host=60)
    rank.add("user_annotation", "Optimizer.step#AdamW.step", begin, rank.now)


def loop_optimizer(rank):
    """400 ops on one parameter at a time."""
    begin = rank.now
    for _ in range(400):
        rank.op("aten::mul_", ("vectorized_elementwise_kernel", 2.0, dict(BIG)), host=10)
    rank.add("user_annotation", "Optimizer.step#AdamW.step", begin, rank.now)


def item(rank):
    """`loss.item()`, and Python that reads it."""
    rank.op("aten::item", host=4, inner=lambda: rank.launch(
        "Memcpy DtoH (Device -> Pageable)", 2.0, 7, "gpu_memcpy", call="cudaMemcpyAsync", blocks=True, bytes=4))  # fmt: skip
    rank.now += 300


def augment(rank):
    for _ in range(20):
        rank.op("aten::mul", host=500)


def evaluate(rank):
    begin = rank.now
    for _ in range(5):
        rank.op("aten::addmm", ("ampere_bf16_s16816gemm_bf16_128x128", 1500.0, dict(BIG)))
    rank.wait()
    rank.add("user_annotation", "evaluate", begin, rank.now)


def flush(rank):
    for name in ("cudaFree", "cudaFree"):
        rank.add("cuda_runtime", name, rank.now, rank.now + 900)
        rank.now += 901
    grow(rank, 0)


def grow(rank, n_frees=2):
    begin = rank.now
    for name in ["cudaFree"] * n_frees + ["cudaMalloc"] * 2:
        rank.add("cuda_runtime", name, rank.now, rank.now + 700)
        rank.now += 701
    rank.add("cpu_op", "aten::empty", begin, rank.now)


def again(rank):
    rank.op("aten::linear", ("ampere_bf16_s16816gemm_bf16_128x128", 1500.0, dict(BIG)), tid=AUTOGRAD)


LOW = {"grid": [8640, 1, 1], "block": [256, 1, 1], "registers per thread": 255, "est. achieved occupancy %": 12}
SMALL = {"grid": [20, 1, 1], "block": [256, 1, 1], "registers per thread": 64, "est. achieved occupancy %": 3}
TINY = (("vectorized_elementwise_kernel", 4.0),) * 12

# One thing wrong: what to find, and how the run differs from the healthy one.
CASES = {
    "small_batch": {"launch": SMALL, "pointwise_launch": SMALL, "shapes": False},
    "tiny_kernels": {"pointwise": TINY, "host_us": 2.0, "product_us": 400.0, "shapes": False},
    "launch_bound": {
        "layers": 40,
        "product_us": 20.0,
        "pointwise": (("vectorized_elementwise_kernel", 11.0),),
        "host_us": 60.0,
        "shapes": False,
        "buckets": (),
    },
    "low_occupancy": {"pointwise": (("my_custom_kernel", 1500.0),), "pointwise_launch": LOW},
    "wrong_precision": {
        "product": "cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4",
        "dtype": "float",
        "product_us": 3000.0,
    },
    "unused_tensor_cores": {"product": "ampere_sgemm_128x64_tn", "dtype": "float", "product_us": 17000.0},
    "unaligned_shapes": {"n": 4095, "product_us": 3000.0},
    "data_loading": {"loading_us": 20_000.0},
    "preprocessing": {"before": augment},
    "pageable_copies": {"copy": "Memcpy HtoD (Pageable -> Device)", "copy_us": 4000.0},
    "synchronisation": {"after_layer": item},
    "logging": {"before": lambda rank: rank.span("log metrics to tensorboard", 4000.0)},
    "checkpointing": {"before": lambda rank: rank.span("torch.save", 10_000.0)},
    "evaluation": {"before": evaluate},
    "host_optimizer": {"optimizer": loop_optimizer, "product_us": 150.0, "shapes": False},
    "load_imbalance": {"n_ranks": 4, "more_layers": {2: 8}},
    "straggler": {"n_ranks": 4, "slower": ((1, 1.5),)},
    "exposed_communication": {"late_buckets": ((200_000_000, 10_000.0),)},
    "small_buckets": {"buckets": (), "late_buckets": ((65_536, 80.0),) * 40, "product_us": 500.0, "shapes": False},
    "slow_links": {"n_ranks": 2, "buckets": ((25_000_000, 15_000.0),) * 3},
    "cache_flush": {"before": flush},
    "allocation_retries": {"before": grow},
    "recompute": {"in_backward": again},
}


def write(folder, documents):
    """Files of a run, one a rank."""
    paths = []
    for document in documents:
        path = folder / f"rank{document['distributedInfo']['rank']}.json"
        path.write_text(json.dumps(document))
        paths.append(path)
    return paths
