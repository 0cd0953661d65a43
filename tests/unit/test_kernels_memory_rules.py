"""Work of copies, fills, gathers, losses, optimizers, dropout, pooling and transfers, counted by hand or by real torch."""

import pytest
import torch

from perfmodel.db import load_device
from perfmodel.estimate import Work
from perfmodel.graph import Op, TensorSpec
from perfmodel.kernels import calls_of, host_cost_s, price, work
from perfmodel.kernels.copy import touched_bytes
from perfmodel.kernels.index import gathered_bytes
from perfmodel.kernels.optimizer import CHUNK_ELEMS, CHUNKS_PER_LAUNCH, launches
from perfmodel.units import GIBI


def spec(value, index=0):
    return TensorSpec(
        id=index,
        shape=tuple(value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        strides=tuple(value.stride()),
        storage=index,
    )


def op(name, inputs, outputs=(), phase="forward", **attrs):
    """`inputs`: a dict of tensors (or lists of tensors) by schema name."""
    flat = [(n, t) for n, v in inputs.items() for t in (v if isinstance(v, (list, tuple)) else [v])]
    return Op(
        id=0,
        name=name,
        inputs=tuple(spec(t, i) for i, (_, t) in enumerate(flat)),
        input_names=tuple(n for n, _ in flat),
        outputs=tuple(spec(t, 100 + i) for i, t in enumerate(outputs)),
        attrs=attrs,
        phase=phase,
    )


def families(each):
    return [call.family for call in calls_of(each)]


x = torch.empty(6, 8)


def test_clone_reads_and_writes_every_element():
    assert work(op("aten.clone", {"self": x}, [x])) == Work(read_bytes=192, write_bytes=192)


def test_a_cast_moves_both_sizes():
    assert work(op("aten._to_copy", {"self": x}, [x.half()])) == Work(read_bytes=192, write_bytes=96)


def test_an_expanded_tensor_is_read_once():
    row = torch.empty(1, 8).expand(6, 8)
    assert touched_bytes(spec(row)) == 32
    assert work(op("aten.clone", {"self": row}, [x])) == Work(read_bytes=32, write_bytes=192)


@pytest.mark.parametrize(
    ("source", "family"),
    [(x, "copy"), (torch.empty(8, 6).t(), "transpose"), (torch.empty(6, 16)[:, :8], "copy"),
     (torch.empty(6, 16)[:, ::2], "copy")],
)  # fmt: skip
def test_a_transposed_copy_is_its_own_family(source, family):
    assert families(op("aten.clone", {"self": source}, [x])) == [family]


def test_copy_does_not_read_its_target():
    assert work(op("aten.copy_", {"self": x, "src": x.double()}, [x])) == Work(read_bytes=384, write_bytes=192)


def test_cat_of_300_tensors_is_three_launches():
    parts = [torch.empty(2, 8) for _ in range(300)]
    each = op("aten.cat", {"tensors": parts}, [torch.empty(600, 8)])
    assert [call.work.write_bytes for call in calls_of(each)] == [128 * 64, 128 * 64, 44 * 64]
    assert work(each) == Work(read_bytes=300 * 64, write_bytes=300 * 64)


def test_cat_skips_empty_inputs():
    each = op("aten.cat", {"tensors": [torch.empty(0), x]}, [x])
    assert work(each) == Work(read_bytes=192, write_bytes=192)


def test_slice_backward_fills_and_copies():
    each = op("aten.slice_backward", {"grad_output": torch.empty(2, 8)}, [x])
    assert families(each) == ["fill", "copy"]
    assert work(each) == Work(read_bytes=64, write_bytes=192 + 64)


@pytest.mark.parametrize("name", ["aten.zeros_like", "aten.full", "aten.arange", "aten.fill_", "aten.new_zeros"])
def test_fills_write_only(name):
    assert work(op(name, {}, [x])) == Work(write_bytes=192)


def test_sectors_of_a_gather():
    # 100 single floats: 100 sectors of 32 bytes. 4 rows of 10 floats: 40 bytes are 2 sectors each.
    assert gathered_bytes(100, 1, 4) == 3200
    assert gathered_bytes(40, 10, 4) == 4 * 64


def test_index_reads_indices_and_what_it_returns():
    z, i, j = torch.empty(5, 4, 4), torch.empty(6, dtype=torch.int64), torch.empty(6, dtype=torch.int64)
    each = op("aten.index", {"self": z, "indices": [i, j]}, [torch.empty(5, 6)])
    assert work(each) == Work(read_bytes=5 * 6 * 4 + 2 * 6 * 8, write_bytes=5 * 6 * 4)


def test_a_boolean_mask_is_counted_first():
    mask = torch.empty(6, dtype=torch.bool)
    each = op("aten.index", {"self": x, "indices": [mask]}, [torch.empty(3, 8)])
    assert families(each) == ["scan", "scan", "index"]


def test_accumulating_index_put_runs_the_kernels_of_a_v100_listing():
    # DLRM interaction backward (owensgroup/ml_perf_model): index kernels, one-tile sort, permuted copy, accumulation.
    z, values = torch.empty(2048, 27, 27), torch.empty(2048, 351)
    i = torch.empty(351, dtype=torch.int64)
    each = op("aten.index_put", {"self": z, "indices": [i, i], "values": values}, [z], accumulate=True)
    assert families(each) == ["copy", *["index"] * 4, "sort", "transpose", "index_accumulate"]


def test_accumulating_rows_moves_whole_rows():
    # 6 rows of 8 floats: the kernel reads 6 x 32 bytes of values and of the target and writes 6 x 32; nothing is permuted.
    z, values, i = torch.empty(5, 8), torch.empty(6, 8), torch.empty(6, dtype=torch.int64)
    each = op("aten.index_put_", {"self": z, "indices": [i], "values": values}, [z], accumulate=True)
    assert families(each) == ["index", "index", "sort", "index_accumulate"]
    assert calls_of(each)[-1].work == Work(flops=48, read_bytes=2 * 192, write_bytes=192)


def test_backward_updates_its_own_zeros_in_place():
    index, src = torch.empty(6, 3, dtype=torch.int64), torch.empty(6, 3)
    inputs = {"self": x, "index": index, "src": src}
    assert families(op("aten.scatter_add", inputs, [x])) == ["copy", "index"]
    assert families(op("aten.scatter_add", inputs, [x], phase="backward")) == ["index"]


@pytest.mark.parametrize(("rows", "lookups"), [(9, 36), (27, 351)])
def test_index_put_accumulate_near_the_v100_listing(rows, lookups):
    measured_s = {36: 36e-6, 351: 319e-6}[lookups]  # indexing_backward_kernel, batch 2048, Tesla V100
    z, values = torch.empty(2048, rows, rows), torch.empty(2048, lookups)
    i = torch.empty(lookups, dtype=torch.int64)
    each = op("aten.index_put", {"self": z, "indices": [i, i], "values": values}, [z], accumulate=True)
    (estimates,) = price([each], load_device("v100_sxm2_16gb"))
    assert estimates[-1].time_s == pytest.approx(measured_s, rel=0.25)


def test_scatter_add_reads_modifies_writes_whole_sectors():
    index, src = torch.empty(6, 3, dtype=torch.int64), torch.empty(6, 3)
    each = op("aten.scatter_add_", {"self": x, "index": index, "src": src}, [x])
    assert work(each) == Work(flops=18, read_bytes=18 * 8 + 18 * 4 + 18 * 32, write_bytes=18 * 32)


def test_large_sorts_count_their_passes():
    keys = torch.empty(10**6, dtype=torch.int64)
    each = op("aten.sort", {"self": keys}, [keys, keys])
    # 64-bit keys, 8 bits a pass: one histogram of the keys, then 8 passes that move 16-byte pairs.
    assert work(each) == Work(read_bytes=8 * 10**6 + 8 * 16 * 10**6, write_bytes=8 * 16 * 10**6)


def brute_force_launches(sizes, max_tensors, max_blocks):
    """multi_tensor_apply, block by block, as ATen/native/cuda/MultiTensorApply.cuh loops."""
    n_launches, tensors, blocks = 0, 0, 0
    for size in sizes:
        if size == 0:
            continue
        tensors += 1
        chunks = -(-size // CHUNK_ELEMS)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            tensors_full = tensors == max_tensors and last
            if tensors_full or blocks == max_blocks:
                n_launches += 1
                blocks = 0
                tensors = 0 if last else 1
    return n_launches + (blocks > 0)


@pytest.mark.parametrize(("depth", "max_tensors"), [(1, 110), (2, 64), (3, 48), (4, 36), (5, 30)])
@pytest.mark.parametrize("seed", range(5))
def test_launches_as_multi_tensor_apply_makes_them(depth, max_tensors, seed):
    import random

    draw = random.Random(seed)
    sizes = [int(10 ** draw.uniform(0, 7.5)) for _ in range(draw.randint(1, 300))]
    groups = launches(sizes, depth)
    assert len(groups) == brute_force_launches(sizes, max_tensors, CHUNKS_PER_LAUNCH)
    assert sum(map(sum, groups)) == sum(sizes)


def test_fused_adam_bytes_per_parameter():
    params = [torch.empty(1000), torch.empty(70_000)]
    steps = [torch.empty(()) for _ in params]
    each = op(
        "aten._fused_adam_",
        {"self": params, "grads": params, "exp_avgs": params, "exp_avg_sqs": params, "state_steps": steps},
        phase="optimizer",
    )
    # Reads parameter, gradient and two moments, writes parameter and moments: 16 + 12 bytes an element.
    total = work(each)
    assert (total.read_bytes, total.write_bytes) == (71_000 * 16, 71_000 * 12)
    assert len(calls_of(each)) == 1


def test_fused_adam_of_a_billion_parameters_in_exact_launches():
    params = [torch.empty(10**9, device="meta")]
    lists = {"self": params, "grads": params, "exp_avgs": params, "exp_avg_sqs": params}
    calls = calls_of(op("aten._fused_adamw_", lists, phase="optimizer"))
    assert len(calls) == -(-(10**9) // (CHUNK_ELEMS * CHUNKS_PER_LAUNCH))
    assert sum(call.work.read_bytes for call in calls) == 16 * 10**9


@pytest.mark.parametrize(
    ("name", "names", "outputs", "read", "write", "flops"),
    [
        ("aten._foreach_add_", ["self", "other"], 0, 2, 1, 2),
        ("aten._foreach_mul_", ["self"], 0, 1, 1, 1),
        ("aten._foreach_addcmul_", ["self", "tensor1", "tensor2"], 0, 3, 1, 3),
        ("aten._foreach_sqrt", ["self"], 1, 1, 1, 1),
        ("aten._foreach_zero_", ["self"], 0, 0, 1, 0),
        ("aten._foreach_lerp_", ["self", "tensors1"], 0, 2, 1, 3),
        ("aten._foreach_copy_", ["self", "src"], 0, 1, 1, 0),
    ],
)
def test_foreach_traffic_in_lists(name, names, outputs, read, write, flops):
    tensors = [torch.empty(100), torch.empty(300)]
    each = op(name, dict.fromkeys(names, tensors), tensors * outputs, phase="optimizer")
    assert work(each) == Work(flops=400 * flops, read_bytes=1600 * read, write_bytes=1600 * write)


def test_nll_loss_backward_fills_the_whole_gradient():
    logits, target = torch.empty(512, 50257, device="meta"), torch.empty(512, dtype=torch.int64)
    each = op("aten.nll_loss_backward", {"grad_output": torch.empty(()), "self": logits, "target": target}, [logits])
    fill, place = calls_of(each)
    assert fill.work.write_bytes == 512 * 50257 * 4
    assert place.work.write_bytes == 512 * 4
    assert place.features["serial_steps"] == 16  # 512 rows / 16 = 32 threads, 16 rows each


def test_binary_cross_entropy_is_pointwise_then_mean():
    p = torch.empty(2048, 1)
    each = op("aten.binary_cross_entropy", {"self": p, "target": p}, [torch.empty(())], reduction=1)
    assert [call.work.bytes for call in calls_of(each)] == [3 * 8192, 8192 + 4]
    no_mean = op("aten.binary_cross_entropy", {"self": p, "target": p}, [p], reduction=0)
    assert len(calls_of(no_mean)) == 1


def test_dropout_writes_a_byte_mask():
    each = op("aten.native_dropout", {"input": x}, [x, x.bool()], p=0.1)
    assert work(each) == Work(flops=96, read_bytes=192, write_bytes=192 + 48)


def test_max_pool_backward_does_not_read_the_input():
    image, pooled = torch.empty(2, 3, 8, 8), torch.empty(2, 3, 4, 4)
    index = torch.empty(2, 3, 4, 4, dtype=torch.int64)
    each = op(
        "aten.max_pool2d_with_indices_backward",
        {"grad_output": pooled, "self": image, "indices": index},
        [image],
        kernel_size=[2, 2],
    )
    assert work(each) == Work(flops=96 * 4, read_bytes=96 * 4 + 96 * 8, write_bytes=384 * 4)


def test_a_copy_to_the_device_crosses_the_link():
    batch = torch.empty(GIBI // 4, device="meta")
    device = load_device("a100_sxm_80gb")
    ((estimate,),) = price([op("perfmodel.host_to_device_copy", {}, [batch], phase="input")], device)
    # 1 GiB over PCIe 4 x16: between the line rate and half of it.
    assert GIBI / 31.5e9 < estimate.time_s < GIBI / 15e9


def test_coalesce_sorts_numbers_and_adds():
    indices, values = torch.empty(1, 6, dtype=torch.int64), torch.empty(6, 16)
    each = op("aten._coalesce", {"self.indices": indices, "self.values": values}, [indices, values])
    assert families(each) == ["fill", "sort", "scan", "index", "copy"]


def test_host_cost_counts_dispatch_launches_and_tensors():
    device = load_device("a100_sxm_80gb")
    host = device.host
    relu = op("aten.relu", {"self": x}, [x])
    assert host_cost_s(relu, 1, device) == pytest.approx(host.op_dispatch_s + host.launch_s)
    assert host_cost_s(op("aten.view", {"self": x}, [x]), 0, device) < 0.3 * host.op_dispatch_s
    few = op("aten._foreach_mul_", {"self": [x] * 2}, phase="optimizer")
    many = op("aten._foreach_mul_", {"self": [x] * 100}, phase="optimizer")
    assert host_cost_s(many, 1, device) > host_cost_s(few, 1, device)


def test_a_cpu_call_is_measured_whole():
    device = load_device("cpu")
    assert host_cost_s(op("aten.mm", {"self": x, "mat2": x.t()}, [x]), 1, device) == device.host.op_dispatch_s
