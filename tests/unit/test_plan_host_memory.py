"""Copies of FSDP2 and gloo on CPUs: the peak of a net of which every byte can be counted by hand."""

from perfmodel.graph import Graph, Op, Parameter, Storage, TensorSpec
from perfmodel.plan.host_memory import HostPasses
from perfmodel.plan.sharded_states import Unit

ELEMS = 100  # of a unit's one parameter
WHOLE = 4 * ELEMS
N = 4  # ranks


def spec(storage: int) -> TensorSpec:
    return TensorSpec(id=storage, shape=(ELEMS,), dtype="float32", strides=(1,), storage=storage)


def op(number: int, phase, module: str, output: int) -> Op:
    return Op(
        id=number, name="aten.mul", inputs=(), input_names=(), outputs=(spec(output),), phase=phase, module=module
    )


def peak(activation_bytes: int = 0, *, stays: bool = False, fetches: bool = True):
    """Two blocks of one parameter each, no rest: forward a (op 0), b (1), backward b (2), a (3), the optimizer (4)."""
    ops = (
        op(0, "forward", "layers.0", 10), op(1, "forward", "layers.1", 11), op(2, "backward", "layers.1", 21),
        op(3, "backward", "layers.0", 20), op(4, "optimizer", "", 30),
    )  # fmt: skip
    parameters = tuple(Parameter(name=f"layers.{i}.weight", tensor=spec(i), grad_op=at) for i, at in ((0, 3), (1, 2)))
    storages = (
        Storage(id=21, bytes=WHOLE, born=2, dies=5, kind="gradient"),
        Storage(id=20, bytes=WHOLE, born=3, dies=5, kind="gradient"),
        Storage(id=10, bytes=activation_bytes, born=0, dies=3),
    )
    graph = Graph(
        model="two", target="cpu", precision="fp32", batch_size=1, ops=ops, parameters=parameters, storages=storages
    )
    units = tuple(
        Unit(number=i, path=f"layers.{i}", parameters=(p,), first=i, backward=3 - i, complete=3 - i, is_root=False)
        for i, p in enumerate(parameters)
    )
    return HostPasses(graph=graph, units=units, n_shards=N, stays=stays, fetches=fetches).peak()


def test_the_fullest_moment_is_the_first_reduction_with_the_next_unit_fetched() -> None:
    # The gradients by rank, gloo's copy of them, the next unit flat; of the gradients this rank's share.
    found = peak()
    assert found.gradients_bytes + found.communication_bytes == 3 * WHOLE + WHOLE // N
    assert peak(activation_bytes=10**6).activations_bytes == 10**6


def test_units_that_stay_are_whole_while_the_next_is_gathered() -> None:
    # The first one whole and flat, the second flat, gloo's copy of it.
    assert peak(stays=True).communication_bytes == 4 * WHOLE


def test_a_unit_that_is_not_fetched_ahead_is_gathered_beside_the_last_reduction() -> None:
    # The last gradients by rank and this rank's share of them, the unit flat, and gloo's copy of it or the whole parameters.
    found = peak(fetches=False)
    assert (found.gradients_bytes, found.communication_bytes) == (WHOLE // N, 3 * WHOLE)
