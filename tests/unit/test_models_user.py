"""A user's own module: from Python, and by `entrypoint`; mistakes in the user's code are one clear line."""

import re
import sys

import pytest
import torch
from torch import nn

from perfmodel.config import load_model
from perfmodel.errors import ConfigError, GraphError
from perfmodel.models import build, from_module, make_optimizers, materialize

GOOD = """
import torch
from torch import nn

def factory(width=4, batch=3):
    module = nn.Linear(width, 2)
    return module, (torch.ones(batch, width),), lambda out: out.sum()

def by_name(width=4):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(width, 1)
        def forward(self, x, scale):
            return (self.layer(x) * scale["by"]).mean()
    return Named(), {"x": torch.ones(5, width), "scale": {"by": torch.tensor(2.0)}}, None

def reads_values():
    module = nn.Linear(2, 2)
    if module.weight.sum().item() > 100:
        raise ValueError("never")
    return module, torch.ones(2, 2), None

def wrong_count():
    return nn.Linear(1, 1)

def wrong_module():
    return 3, torch.ones(1), None

def wrong_loss():
    return nn.Linear(1, 1), torch.ones(1, 1), "mse"

def no_tensor():
    return nn.Linear(1, 1), (), None

def fails():
    return nn.Linear(4, 4)(torch.ones(2, 3))

def needs_argument(size):
    return None

number = 3
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with a module of its own name, so that no import is cached from another test."""
    name = f"user_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def entrypoint(workspace, factory, **more):
    return build(load_model({"entrypoint": f"{workspace}:{factory}", **more}))


def test_a_factory_is_built_on_meta_and_realized_on_cpu(workspace):
    built = entrypoint(workspace, "factory", arguments={"width": 6}, optimizer="adamw", name="mine")
    assert built.module.weight.shape == (2, 6)
    assert built.module.weight.is_meta
    assert built.args[0].is_meta
    assert (built.name, built.batch_size, built.optimizer) == ("mine", 3, "adamw")
    real = materialize(built, 4)
    assert torch.equal(real.args[0], torch.ones(3, 6))
    assert real.loss(real.module(*real.args)).shape == ()
    assert torch.equal(real.module.weight, materialize(built, 4).module.weight)


def test_inputs_by_name_and_a_module_that_returns_its_loss(workspace):
    real = materialize(entrypoint(workspace, "by_name"))
    assert real.batch_size == 5
    loss = real.loss(real.module(*real.args, **real.kwargs))
    loss.backward()
    for optimizer in make_optimizers(real):
        optimizer.step()
    assert [tuple(t.shape) for t in real.input_tensors] == [(5, 4), ()]


def test_a_factory_that_reads_values_is_run_on_cpu_and_moved(workspace):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    built = entrypoint(workspace, "reads_values")
    assert torch.equal(torch.rand(3), expected)
    assert "reads tensor values" in built.notes[0]
    assert built.module.weight.is_meta
    assert not materialize(built).module.weight.is_meta


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{name}:factoru", "has no 'factoru'; did you mean 'factory'"),
        ("{name}_x:factory", "no module named '.*_x' .looked in"),
        ("{name}:number", "found a int, allowed a function or class"),
        ("{name}:wrong_count", "the factory returned a Linear, allowed .module, inputs, loss."),
        ("{name}:wrong_module", "module: found a int, allowed a torch.nn.Module"),
        ("{name}:wrong_loss", "the factory returned a str as loss, allowed a function or None"),
        ("{name}:no_tensor", "inputs: found no tensor"),
        ("{name}:fails", rf"user_.*\.py:{GOOD[: GOOD.index('torch.ones(2, 3))')].count(chr(10)) + 1}: RuntimeError: "),
        ("{name}:needs_argument", "TypeError: needs_argument.. missing 1 required positional argument: 'size'"),
    ],
)
def test_a_bad_entrypoint_is_one_clear_line(workspace, target, says):
    spec = load_model({"entrypoint": target.format(name=workspace)})
    with pytest.raises(ConfigError) as caught:
        build(spec)
    assert len(caught.value.problems) == 1
    assert re.search(says, caught.value.problems[0]), caught.value.problems
    assert "\n" not in caught.value.problems[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def factory(:\n", r":1: SyntaxError: "),
        ("import no_such_package_at_all\n", r"\.py:1: ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("x = 1\nraise OSError('disk on fire')\n", r"\.py:2: OSError: disk on fire"),
    ],
)
def test_a_module_that_fails_on_import_names_its_line(tmp_path, monkeypatch, text, says):
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(load_model({"entrypoint": f"{name}:factory"}))
    assert re.search(says, caught.value.problems[0]), caught.value.problems


def test_from_module_takes_a_tensor_a_tuple_or_a_dict():
    module = nn.Linear(3, 1)
    x = torch.ones(7, 3)
    for inputs in (x, (x,), [x]):
        built = from_module(module, inputs, lambda out: out.mean())
        assert (built.args[0].shape, built.batch_size, built.name) == (x.shape, 7, "Linear")
    assert from_module(module, {"input": x}, lambda out: out.mean()).kwargs["input"] is x
    assert materialize(built) is built


def test_from_module_finds_tables_and_sparse_parameters():
    module = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    built = from_module(module, torch.zeros(3, 2, dtype=torch.long), lambda out: out.mean(), sparse_optimizer="adagrad")
    assert [(t.parameter, t.rows, t.dim) for t in built.tables] == [("0.weight", 10, 4)]
    assert [type(o).__name__ for o in make_optimizers(built)] == ["SGD", "Adagrad"]


def test_an_unknown_option_is_one_clear_line():
    for option in ({"optimizer": "sdg"}, {"precision": "fp61"}, {"sparse_optimizer": "lars"}):
        with pytest.raises(ConfigError, match=f"from_module: {next(iter(option))}.*found '.*', allowed ") as caught:
            from_module(nn.Linear(3, 1), torch.ones(2, 3), **option)
        assert len(caught.value.problems) == 1


def test_bf16_converts_module_and_inputs():
    built = from_module(nn.Linear(3, 1), torch.ones(2, 3), lambda out: out.mean(), precision="bf16")
    assert built.module.weight.dtype == built.args[0].dtype == torch.bfloat16


class Output:
    def __init__(self, loss):
        self.loss = loss


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"loss": x}, Output, lambda x: Output((x, 1))])
def test_a_loss_inside_the_output_is_found(wrap):
    built = from_module(nn.Linear(3, 1), torch.ones(2, 3))
    value = torch.tensor(2.0)
    assert built.loss(wrap(value)) is value


@pytest.mark.parametrize("output", [torch.ones(2, 3), {"logits": 1}, Output(None), torch.tensor(3)])
def test_no_loss_says_what_to_do(output):
    built = from_module(nn.Linear(3, 1), torch.ones(2, 3))
    with pytest.raises(GraphError, match=r"no loss: the module returned .*; pass loss="):
        built.loss(output)


def test_a_module_on_meta_cannot_be_realized():
    with torch.device("meta"):
        built = from_module(nn.Linear(3, 1), torch.ones(2, 3))
    with pytest.raises(GraphError, match="no values"):
        materialize(built)
