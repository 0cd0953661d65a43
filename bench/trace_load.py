"""How fast a large trace is read, and in how much memory: a generated file, steps of a real shape repeated.

    python bench/trace_load.py [GIGABYTES]

Prints MB/s of JSON, seconds a GB and the peak resident memory over the size of the JSON.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

GB = 10**9


def step(number: int, base: int) -> str:
    """One step of 400 ops with shapes, launches, kernels and flow events, as PyTorch writes them."""
    rows = []

    def add(ph: str, cat: str, name: str, ts: float, **more: object) -> None:
        rows.append({"ph": ph, "cat": cat, "name": name, "pid": 4242, "tid": 4242, "ts": ts, **more})

    add("X", "user_annotation", f"ProfilerStep#{number}", base, dur=60_000.5, args={"External id": number})
    for i in range(400):
        ts, uid = base + 150 * i + 0.25, number * 400 + i + 1
        dims = [[64, 128 + i % 16], [128 + i % 16, 256], []]
        args = {
            "External id": uid,
            "Record function id": 0,
            "Ev Idx": uid,
            "Input Dims": dims,
            "Input type": ["float", "float", ""],
        }
        add("X", "cpu_op", "aten::addmm", ts, dur=80.125, args=args)
        add(
            "X",
            "cuda_runtime",
            "cudaLaunchKernel",
            ts + 20,
            dur=5.5,
            args={"External id": uid, "cbid": 211, "correlation": uid},
        )
        add("s", "ac2g", "ac2g", ts + 20, id=uid)
        add("f", "ac2g", "ac2g", ts + 40, id=uid, bp="e")
        args = {
            "External id": uid, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": uid, "blocks per SM": 0.59,
            "registers per thread": 90, "shared memory": 49152, "warps per SM": 2.37, "grid": [64, 1, 1], "block": [128, 1, 1],
            "est. achieved occupancy %": 4,
        }  # fmt: skip
        name = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4>(cutlass::Params)"
        add("X", "kernel", name, ts + 40, dur=33.5, args=args)
    return ",\n".join(json.dumps(row) for row in rows)


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 0.2) * GB)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with path.open("w") as file:
            file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [\n')
            number = 0
            while file.tell() < size:
                file.write((",\n" if number else "") + step(number, number * 61_000))
                number += 1
            file.write("\n]}")
        size = path.stat().st_size
        from perfmodel.traces.kineto import read_kineto

        begin = time.perf_counter()
        trace = read_kineto(path)
        spent = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{size / GB:.2f} GB, {trace.n_events:,} events, {len(trace.device):,} kernels, {len(trace.steps):,} steps")
    print(f"{size / spent / 1e6:.0f} MB/s, {spent / (size / GB):.1f} s a GB, peak memory {peak / size:.2f} x the JSON")


if __name__ == "__main__":
    main()
