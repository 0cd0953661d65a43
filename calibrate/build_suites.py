"""Writes configs/suites/*.csv from the collected public measurements: `python -m calibrate.build_suites SHARED_DIR [OUT]`.

SHARED_DIR is the folder with `data/end_to_end.csv` and `data/megatron_a100_*_node.csv`. What each row's columns do not say
(which model file, machine and plan a published run used) stands in the tables here; nothing is fitted.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from perfmodel.validate.suite import COLUMNS

Row = Mapping[str, str]
Cells = dict[str, str]

NEUSIGHT = "sitar-lab/NeuSight"
EXAMPLES = "NVIDIA/DeepLearningExamples"
MLPERF = "mlcommons/training_results"

NEUSIGHT_MODELS = {
    ("bert_large", "train"): "bert_large_eager", ("bert_large", "infer"): "bert_large_classifier_eager",
    "gpt2_large": "gpt2_large_eager", "gpt3_xl": "gpt3_xl_eager", "gpt3_27": "gpt3_2_7b_eager", "opt_13": "opt_1_3b_eager",
}  # fmt: skip
SINGLE_GPU = {
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb", "NVIDIA A100 80GB PCIe": "a100_pcie_80gb", "NVIDIA H100 80GB HBM3": "h100",
    "Tesla V100-PCIE-32GB": "v100_pcie", "Tesla P100-PCIE-16GB": "p100", "Tesla P4": "p4", "Tesla T4": "t4",
    "NVIDIA A100-SXM4-80GB": "a100", "Tesla V100-SXM2-32GB": "v100", "Tesla V100-SXM3-32GB": "v100_sxm3",
    "Tesla V100-SXM2-16GB": "v100_16gb", "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "Tesla V100-SXM3-32GB (450W)": "v100_sxm3",  # of the DGX-2H, whose peak is 5 % higher by its datasheet
}  # fmt: skip
NODES = {
    ("NVIDIA A100-SXM4-80GB", 8): "dgx_a100_80gb", ("NVIDIA A100-SXM4-80GB", 16): "topologies/dgx_a100_80gb_x2.yaml",
    ("NVIDIA A100-SXM4-40GB (400W)", 8): "dgx_a100", ("NVIDIA A100-SXM4-40GB", 2): "topologies/dgx_a100_2gpu.yaml",
    ("NVIDIA A100-SXM4-40GB", 4): "topologies/dgx_a100_4gpu.yaml", ("NVIDIA A100-SXM4-40GB", 8): "dgx_a100",
    ("Tesla V100-SXM2-16GB", 2): "topologies/dgx1_v100_2gpu.yaml",
    ("Tesla V100-SXM2-16GB", 4): "topologies/dgx1_v100_4gpu.yaml",
    ("Tesla V100-SXM2-32GB", 8): "topologies/dgx1_v100_32gb.yaml", ("Tesla V100-SXM2-16GB", 8): "dgx1_v100",
    ("Tesla V100-SXM3-32GB", 8): "topologies/dgx2_v100_8.yaml", ("Tesla V100-SXM3-32GB", 16): "dgx2_v100",
    ("Tesla V100-SXM3-32GB (450W)", 2): "topologies/dgx2_v100_2.yaml",
    ("Tesla V100-SXM3-32GB (450W)", 4): "topologies/dgx2_v100_4.yaml",
    ("Tesla V100-SXM3-32GB (450W)", 8): "topologies/dgx2_v100_8.yaml",
    ("Tesla V100-SXM3-32GB (450W)", 16): "dgx2_v100",
}  # fmt: skip
# MLPerf systems with one node of a kind that we ship.
MLPERF_NODES = {
    "NVIDIA A100-SXM4-40GB (400W)": "dgx_a100", "NVIDIA A100-SXM4-40GB": "dgx_a100",
    "NVIDIA A100-SXM4-80GB": "dgx_a100_80gb", "NVIDIA A100-SXM4-80GB (400W)": "dgx_a100_80gb",
    "NVIDIA H100-SXM5-80GB": "dgx_h100", "NVIDIA H200-SXM5-141GB": "dgx_h200",
    "NVIDIA Blackwell GPU (B200-SXM-180GB)": "dgx_b200",
}  # fmt: skip
MLPERF_MODELS = {
    "dlrm_mlperf": ("models/dlrm_mlperf_v07.yaml", "embeddings=table_wise"),
    "dlrm_dcnv2_mlperf": ("dlrm_dcnv2", "embeddings=table_wise"),
    "resnet50_mlperf": ("resnet50", "ddp"),
    "bert_large_mlperf": ("bert_large", "ddp"),
}
MEGATRON_PLAN = "data_parallel.reduce=after_backward,pipeline.host_sync=true"
MEGATRON_SENDS = "pipeline.scatter_gather=true"  # the default of Megatron-LM and of DeepSpeed
VTRAIN_ROWS = "tensor_parallel.vocabulary_parallel=false"  # each rank has its part of the vocabulary to itself
MEGATRON_NODES = {
    2: "topologies/dgx_a100_80gb_2gpu.yaml", 4: "topologies/dgx_a100_80gb_4gpu.yaml", 8: "dgx_a100_80gb",
    64: "topologies/dgx_a100_80gb_4nic_x8.yaml", 128: "topologies/dgx_a100_80gb_4nic_x16.yaml",
    256: "topologies/dgx_a100_80gb_4nic_x32.yaml",
    512: "topologies/dgx_a100_80gb_4nic_x64.yaml",
}  # fmt: skip
MEGATRON_SOURCE = "VIA-Research/vTrain @f8dda8473a48b373b1d25f51f52d685bff5150c5 data/ground_truth"
# run_pretraining.sh reads phase 2 from `bin_size_64/parquet`: a batch is as long as its longest sample, in steps of 64 tokens.
# At 512 tokens each, the V100 rows' 18.7 sequences/s would be 19.2 TFLOP/s in fp32 of a device with 15.7.
IMPOSSIBLE = "not scored: batches of this phase are binned by length, most have fewer than 512 tokens"
# Of the README's command line (facebookresearch/dlrm, torchrec_dlrm).
TORCHREC_ROWS = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
# Nodes of MLPerf's language models: the name a topology's begins with, and GPUs of a node.
LLM_NODES = {
    "NVIDIA H100-SXM5-80GB": ("dgx_h100", 8), "NVIDIA H200-SXM5-141GB": ("dgx_h200", 8),
    "NVIDIA Blackwell GPU (B200-SXM-180GB)": ("dgx_b200", 8), "NVIDIA Blackwell GPU (GB200)": ("gb200", 4),
}  # fmt: skip
SHIPPED_NODES = ("dgx_h100", "dgx_h100_x2", "dgx_h200", "dgx_h200_x2", "dgx_b200")
GPT3_PLAN = "tp=4,pp=8,schedule=interleaved,chunks=6,sequence=true,shard=optimizer"
_GPU_WORD = re.compile(r"NVIDIA|Tesla|GPU|[()]")


def tier(row: Row) -> str:
    """`A+`, `A`, `B`, `C` or `D`."""
    return row["notes"].split(";")[0].removeprefix("q=")


def note_value(row: Row, key: str) -> str:
    """The value of `key=value` in a row's notes, or nothing."""
    found = re.search(rf"(?:^|;)\s*{key}=([^;]*)", row["notes"])
    return found.group(1) if found else ""


def cells(
    row: Row, *, model: str, topology: str, plan: str = "ddp", mode: str = "eager", phase: str = "train"
) -> Cells:
    """One suite row from a row of end_to_end.csv."""
    batch = int(float(row["batch_per_gpu"]))
    seq_len = str(int(float(row["seq_len"]))) if row["seq_len"] else ""
    gpu = "-".join(_GPU_WORD.sub(" ", row["gpu"]).split())
    words = [row["model"], row["task"], f"b{batch}"] + ([f"s{seq_len}"] if seq_len else [])
    return {
        "name": "-".join([*words, row["precision"], f"{row['num_gpus']}x", gpu] + ([] if mode == "eager" else [mode])),
        "model": model,
        "topology": topology,
        "plan": plan,
        "batch_per_rank": str(batch),
        "seq_len": seq_len,
        "precision": row["precision"],
        "mode": mode,
        "phase": phase,
        "measured_s": f"{float(row['measured_ms_per_iter']) / 1e3:.7g}",
        "weight": "1",
        "source": f"{row['source']} @{row['commit']} {row['path']}",
        "note": row["notes"].replace("use=holdout;", "").strip("; "),
    }


def neusight(rows: Iterable[Row], keep: Callable[[Row], bool]) -> Iterator[Cells]:
    """Single-GPU transformers; the mixture-of-experts model is not one of the four kinds."""
    for row in rows:
        if row["source"] != NEUSIGHT or row["num_gpus"] != "1" or row["model"] == "switchxl4" or not keep(row):
            continue
        model = NEUSIGHT_MODELS.get((row["model"], row["task"])) or NEUSIGHT_MODELS[row["model"]]
        yield cells(
            row,
            model=f"models/{model}.yaml",
            topology=SINGLE_GPU[row["gpu"]],
            mode="compile" if "fusion" in row["path"] else "eager",
            phase="forward_backward" if row["task"] == "train" else "forward",
        )


def parallel(rows: Iterable[Row]) -> Iterator[Cells]:
    """Four A100 of one node under data, tensor and pipeline parallelism.

    `accelerate`'s Megatron engine steps the optimizer inside what was timed, so the phase is `train`.
    """
    plans = {"dp4": "data_parallel.reduce=after_backward", "tp4": "tp=4", "pp4": "pp=4,micro_batches=1"}
    for row in rows:
        if row["source"] == NEUSIGHT and row["num_gpus"] == "4":
            plan = plans[note_value(row, "parallel")]
            made = cells(
                row, model="models/gpt2_large_megatron.yaml", topology="topologies/hgx_4xa100_40gb.yaml", plan=plan
            )
            yield {**made, "name": f"{made['name']}-{note_value(row, 'parallel')}"}


def dlrm(rows: Iterable[Row]) -> Iterator[Cells]:
    """PyTorch DLRM, tiers A+ and A. The example code's placements are those its `get_device_mapping` makes."""
    for row in rows:
        n_gpus, pytorch = int(row["num_gpus"]), row["source"] == EXAMPLES or "framework=pytorch" in row["notes"]
        if not row["model"].startswith("dlrm") or tier(row) not in ("A+", "A") or not pytorch:
            continue
        if row["model"] == "dlrm_mlperf":
            yield cells(
                row, model="models/dlrm_mlperf_v07_joint.yaml", topology="dgx_a100", plan="plans/dlrm_mlperf_v07_8.yaml"
            )
        elif row["model"] == "dlrm_small":
            yield cells(row, model="models/dlrm_t15_joint.yaml", topology=SINGLE_GPU[row["gpu"]], mode="cuda_graph")
        else:
            half = "fp16_" if row["precision"] == "amp_fp16" else ""  # lookups give 16-bit rows under AMP there
            plan = f"plans/dlrm_t3_{half}{n_gpus}.yaml"
            topology = NODES[row["gpu"], n_gpus]
            model = f"models/dlrm_t3_joint_{n_gpus}.yaml"
            yield cells(row, model=model, topology=topology, plan=plan, mode="cuda_graph")


def dlrm_inference(rows: Iterable[Row]) -> Iterator[Cells]:
    """The example code's latencies on one A100, with and without CUDA graphs; with AMP it makes the model `half()`."""
    for row in rows:
        if row["source"] == EXAMPLES and row["model"] == "dlrm_small" and row["task"] == "infer":
            mode = "cuda_graph" if note_value(row, "cuda_graphs") == "on" else "eager"
            model = "dlrm_t15_joint" if mode == "cuda_graph" else "dlrm_t15_eager_joint"
            made = cells(row, model=f"models/{model}.yaml", topology="a100", mode=mode, phase="forward")
            yield made | ({"precision": "fp16"} if row["precision"] == "amp_fp16" else {})


def nvidia_reference(rows: Iterable[Row]) -> Iterator[Cells]:
    """BERT, Transformer-XL, ResNet-50 and ResNeXt-101 of NVIDIA's examples on one node."""
    for row in rows:
        machine = (
            SINGLE_GPU.get(row["gpu"]) if row["num_gpus"] == "1" else NODES.get((row["gpu"], int(row["num_gpus"])))
        )
        if row["source"] != EXAMPLES or row["task"] != "train" or machine is None:
            continue
        nhwc = row["precision"].startswith("amp")
        if row["model"] == "resnet50v1.5":
            yield cells(
                row, model="models/resnet50_nhwc.yaml" if nhwc else "models/resnet50_nchw.yaml", topology=machine
            )
        elif row["model"] == "resnext101-32x4d":
            model = "models/resnext101_32x4d.yaml" if nhwc else "models/resnext101_32x4d_nchw.yaml"
            yield cells(row, model=model, topology=machine)
        elif row["model"] in ("bert_large_pretrain", "bert_large_pretrain_multinode"):
            yield _accumulated(row, machine)
        elif row["model"].startswith("transformer-xl"):
            name = f"{row['model'].replace('-', '_')}_b{int(float(row['batch_per_gpu']))}"  # the file says the tokens
            half = row["precision"] == "amp_fp16"  # apex's O2: the model is of 16 bits
            made = cells(row, model=f"models/{name}{'_o2' if half else ''}.yaml", topology=machine) | {"seq_len": ""}
            yield made | ({"precision": "fp16"} if half else {})


def _accumulated(row: Row, machine: str) -> Cells:
    """BERT pretraining: the published time is of a micro-batch; the optimizer and all-reduce of all of them are in it.

    As run_pretraining.sh runs it: TorchScript fuses (here `compile`), `--fp16` makes the model `half()`.
    """
    n_micro = int(re.search(r"accumulation_steps=(\d+)", row["notes"]).group(1))  # type: ignore[union-attr]  # all rows have it
    model = "bert_large_apex" if row["seq_len"].startswith("512") else "bert_large_apex_128"
    made = cells(row, model=f"models/{model}.yaml", topology=machine, plan=f"ddp,accumulate={n_micro}", mode="compile")
    made |= {"measured_s": f"{float(row['measured_ms_per_iter']) / 1e3 * n_micro:.7g}"}
    if row["precision"] == "amp_fp16":
        made |= {"precision": "fp16"}
    if row["seq_len"].startswith("512"):
        made |= {"weight": "0", "note": f"{made['note']}; {IMPOSSIBLE}"}
    return made


def mlperf(rows: Iterable[Row]) -> Iterator[Cells]:
    """One node, several frameworks: only the order of systems means anything, so no row has a weight."""
    seen: set[str] = set()
    for row in rows:
        known = row["source"].startswith(MLPERF) and row["num_gpus"] == "8" and row["gpu"] in MLPERF_NODES
        if not known or row["model"] not in MLPERF_MODELS or tier(row) not in ("A+", "A", "B"):
            continue
        model, plan = MLPERF_MODELS[row["model"]]
        made = cells({**row, "precision": "amp_fp16"}, model=model, topology=MLPERF_NODES[row["gpu"]], plan=plan)
        made |= {"weight": "0", "name": f"{made['name']}-{row['source'].rpartition('_')[2]}"}
        if made["name"] not in seen:  # the first of several submitters with the same system in a round
            seen.add(made["name"])
            yield made


def mlperf_llm(rows: Iterable[Row]) -> Iterator[Cells]:
    """GPT-3 175B and Llama 2 70B under LoRA, one row a system: only the order means anything, so no row has a weight.

    Replicas are the global batch over the steps of accumulation, with micro-batches of one sequence. Assumed: ranks of a
    replica are tensor parallel (LoRA), or four of tensor and eight of pipeline parallel with six runs of layers (GPT-3, whose
    rows all leave 32 ranks a replica). The models say FP8.
    """
    seen: set[tuple[str, ...]] = set()
    for row in rows:
        if row["model"] not in ("gpt3_175b", "llama2_70b_lora") or row["gpu"] not in LLM_NODES:
            continue
        batch, steps, n_gpus = (
            int(note_value(row, "global_batch")),
            int(note_value(row, "grad_accum")),
            int(row["num_gpus"]),
        )
        system = (
            row["model"],
            row["gpu"],
            row["num_gpus"],
            str(batch),
            row["source"] if row["model"] == "gpt3_175b" else "",
        )
        if system in seen:
            continue
        seen.add(system)
        node, size = LLM_NODES[row["gpu"]]
        machine = f"{node}_x{n_gpus // size}" if n_gpus > size or node == "gb200" else node
        n_replicas = batch // steps
        gpt3 = row["model"] == "gpt3_175b"
        spread = GPT3_PLAN if gpt3 else f"tp={n_gpus // n_replicas}"
        made = cells(
            {**row, "precision": "bf16", "batch_per_gpu": str(batch // n_replicas)},
            model=f"models/{'gpt3_175b_mlperf' if gpt3 else 'llama2_70b_lora_fp8'}.yaml",
            topology=machine if machine in SHIPPED_NODES else f"topologies/{machine}.yaml",
            plan=f"{spread},dp={n_replicas},micro_batches={steps}",
        )
        yield made | {"weight": "0", "name": f"{made['name']}-{row['source'].rpartition('_')[2]}"}


def torchrec(folder: Path) -> Iterator[Cells]:
    """TorchRec's example on 8 A100, as posted in its README without a placement: the largest tables go round the ranks.

    The third posted row (unpooled multi-hot lookups on 8 H100) names no number of indices a feature: it cannot be expressed.
    """
    sized = sorted(range(len(TORCHREC_ROWS)), key=lambda table: -TORCHREC_ROWS[table])
    where = {f"t{table}": {"sharding": "table_wise", "ranks": [place % 8]} for place, table in enumerate(sized)}
    plan = json.dumps({"embeddings": {"pipeline": "sparse_dist", "placement": where}})
    found = json.loads((folder / "sharding" / "measured_iterations.json").read_text(encoding="utf-8"))["dlrm_readme"]
    for row in found:
        kind = "dot" if row["interaction"] == "dot" else "dcn"
        yield {
            "name": f"torchrec-{kind}-b{row['local_batch']}-8x-A100-40GB", "model": f"models/torchrec_dlrm_{kind}.yaml",
            "topology": "aws_p4d", "plan": plan, "batch_per_rank": str(row["local_batch"]), "seq_len": "",
            "precision": "fp32", "mode": "eager", "phase": "train", "measured_s": f"{row['iter_ms'] / 1e3:.7g}",
            "weight": "1", "source": "facebookresearch/dlrm @090956ee torchrec_dlrm/README.MD",
            "note": "placement not posted; from it/s of a training run with its data loader; precision assumed",
        }  # fmt: skip


def megatron(folder: Path) -> Iterator[Cells]:
    """Megatron-DeepSpeed GPT: fp16 with full recomputation, 1F1B, no gradient buckets (PROVENANCE of the data).

    Times of one node were put together by the source's simulator, from the functions of its own model.
    """
    for kind, plan in (("single", VTRAIN_ROWS), ("multi", MEGATRON_SENDS)):
        for number, row in enumerate(_read(folder / f"megatron_a100_{kind}_node.csv")):
            size = (row["hidden_size"], row["num_heads"], row["num_layers"])
            n_micro = int(row["global_batch"]) // int(row["dp"]) // int(row["micro_batch"])
            yield {
                "name": f"{kind}-{number}-h{size[0]}-l{size[2]}-t{row['tp']}-d{row['dp']}-p{row['pp']}",
                "model": f"models/{_megatron_model(kind, size, row['tp'])}.yaml",
                "topology": MEGATRON_NODES[int(row["num_gpus"])],
                "plan": f"tp={row['tp']},pp={row['pp']},micro_batches={n_micro},{MEGATRON_PLAN},{plan}",
                "batch_per_rank": str(int(row["global_batch"]) // int(row["dp"])),
                "seq_len": row["seq_len"],
                "precision": "bf16",
                "mode": "eager",
                "phase": "train",
                "measured_s": f"{float(row['measured_ms_per_iter']) / 1e3:.7g}",
                "weight": "1",
                "source": f"{MEGATRON_SOURCE}_{kind}.csv",
                "note": "fp16 there; the 16-bit types take the same time",
            }


def _megatron_model(kind: str, size: Sequence[str], ranks: str) -> str:
    return f"vtrain_{'_'.join(size)}_t{ranks}" if kind == "single" else f"megatron_{'_'.join(size)}"


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_suite(path: Path, rows: Iterable[Cells]) -> int:
    """Writes one suite; equal names are told apart by a number. Returns the number of cases."""
    named: dict[str, int] = {}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            named[row["name"]] = named.get(row["name"], 0) + 1
            again = f"-{named[row['name']]}" if named[row["name"]] > 1 else ""
            writer.writerow({**row, "name": row["name"] + again})
    return sum(named.values())


def suites(shared: Path) -> dict[str, Iterator[Cells]]:
    """Every shipped suite by name."""
    rows = _read(shared / "data" / "end_to_end.csv")
    return {
        "transformers_gpu": neusight(rows, lambda row: tier(row) == "A"),
        "transformers_gpu_training": neusight(rows, lambda row: row["task"] == "train"),
        "parallel_gpu": parallel(rows),
        "dlrm_gpu": dlrm(rows),
        "dlrm_inference_gpu": dlrm_inference(rows),
        "nvidia_reference": nvidia_reference(rows),
        "mlperf_systems": mlperf(rows),
        "mlperf_llm": mlperf_llm(rows),
        "torchrec_posted": torchrec(shared / "data"),
        "megatron_a100": megatron(shared / "data"),
    }


if __name__ == "__main__":
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("configs/suites")
    for name, made in suites(Path(sys.argv[1])).items():
        sys.stdout.write(f"{name}: {write_suite(out / f'{name}.csv', made)} cases\n")
