"""Every command: an example that fits, JSON for programs, silence when asked, stdin, and errors on one line."""

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from perfmodel.cli import COMMANDS, SUMMARIES, cli
from perfmodel.cli.predict import predict

# What they make is itself a file, a script or rows of a file; there is nothing for JSON to say.
WITHOUT_JSON = {
    "topo import",
    "devices add",
    "completion",
    "sweep",
    "calibrate kernels",
    "calibrate collectives",
    "trace export",
    "trace calibrate",
}


def leaves(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield " ".join((*path, name)), command
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


LEAVES = dict(leaves(cli))


def run(*arguments, **more):
    command = [sys.executable, "-m", "perfmodel.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def test_every_command_is_summed_up():
    assert set(COMMANDS) == set(SUMMARIES)


@pytest.mark.parametrize("name", LEAVES)
def test_help_says_what_it_does_with_an_example_of_this_very_command(name):
    command = LEAVES[name]
    assert command.help
    assert command.epilog is not None, f"{name} has no example"
    words = command.epilog.partition("perfmodel ")[2]
    known = {name, "compare", "diff"} if name in ("compare", "diff") else {name}
    assert any(words.startswith(one) for one in known), words
    for option in (
        word.partition("=")[0]
        for word in words.split(";")[0].split(" -- ")[0].split()
        if word.startswith("--") and len(word) > 2
    ):
        assert any(option in (*param.opts, *param.secondary_opts) for param in command.params), (
            f"{name}: the example has {option}"
        )


@pytest.mark.parametrize("name", [name for name in LEAVES if name not in WITHOUT_JSON])
def test_every_answer_comes_as_json_too(name):
    assert any("--json" in param.opts or "--markdown" in param.opts for param in LEAVES[name].params), name


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_says_what_it_is(name):
    for param in LEAVES[name].params:
        assert not isinstance(param, click.Option) or param.help, f"{name} {param.opts}"


def test_stdin_takes_the_place_of_one_file():
    model = "kind: transformer\nname: tiny\narchitecture: gpt2\nbatch_size: 2\nprecision: fp32\noptimizer: sgd\n"
    model += "vocab_size: 64\nhidden_size: 32\nlayers: 1\nheads: 2\nmax_positions: 8\nsequence_length: 8\n"
    done = run("predict", "--model", "-", "--topo", "v100", "--json", input=model)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "tiny"
    done = run("predict", "--model", "-", "--topo", "-", input=model)
    assert (done.returncode, done.stdout) == (2, "")
    assert "stdin is read once" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["predict", "--model", "", "--topo", "dgx"], "model: found an empty name"),
        (["predict", "--model", "dlrm", "--topo", "dgx", "--trace", ""], "found an empty name, allowed a file to write"),
        (["predict", "--model", "dlrm", "--topo", "dgx", "--html", "/"], "found a folder, allowed a file to write"),
        (["predict", "--model", "dlrm", "--topo", "dgx", "--plot", "x.gif"], "found suffix '.gif', allowed .svg, .png, .pdf"),
        (["predict", "--model", "dlmr", "--topo", "dgx"], "did you mean 'dlrm'?"),
        (["predicct"], "did you mean 'predict'?"),
        (["doctor", "--device", "h100_smx"], "did you mean 'h100_sxm'?"),
        (["diff", "-", "-"], "stdin is read once"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(arguments, expected, tmp_path):
    done = run(*arguments, cwd=tmp_path, input="")
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_color_and_quiet(tmp_path):
    plot = str(tmp_path / "p.svg")
    arguments = ["--model", "dlrm_small", "--topo", "dgx", "--plot", plot]
    loud = run("predict", *arguments)
    quiet = run("predict", *arguments, "--quiet")
    assert loud.stdout == quiet.stdout
    assert "wrote" in loud.stderr
    assert quiet.stderr == ""
    assert "\x1b[" not in loud.stdout
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"p-{part}.svg" for part in ("breakdown", "memory", "path", "roofline", "timeline", "topology")]


def test_plots_of_equal_runs_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        done = CliRunner().invoke(
            predict, ["--model", "dlrm_small", "--topo", "dgx", "--plot", str(tmp_path / f"{name}.svg")]
        )
        assert done.exit_code == 0
    for part in ("breakdown", "timeline", "roofline"):
        assert (tmp_path / f"a-{part}.svg").read_bytes() == (tmp_path / f"b-{part}.svg").read_bytes()


def test_a_shell_completes_shipped_names():
    words = {"_PERFMODEL_COMPLETE": "bash_complete", "COMP_WORDS": "perfmodel predict --topo dgx_h", "COMP_CWORD": "3"}
    import os

    runner = "import sys; from perfmodel.cli import cli; cli.main(prog_name='perfmodel')"
    done = subprocess.run(
        [sys.executable, "-c", runner], capture_output=True, text=True, check=False, env={**os.environ, **words}
    )
    assert set(done.stdout.split()) >= {"plain,dgx_h100", "plain,dgx_h200"}


def test_the_doctor_knows_what_is_fitted():
    body = json.loads(run("doctor", "--device", "h100_sxm", "--json").stdout)
    (device,) = body["devices"]
    assert "gemm" in device["fitted"]
    assert {row["package"] for row in body["packages"]} >= {"torch", "python", "jinja2"}
