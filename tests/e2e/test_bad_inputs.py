"""Bad input gets one clear line for each mistake, exit code 2 and no traceback; nothing is left half-written."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from perfmodel.cli import main

GOOD_MODEL = """
kind: dlrm
name: tiny
batch_size: 64
dense_features: 4
bottom_mlp: [8, 4]
top_mlp: [8, 1]
embedding_dim: 4
tables:
  - {rows: 100}
  - {rows: 200}
"""
GOOD_TOPO = """
name: box
node:
  gpus: {count: 2, device: a100_sxm_40gb}
  nvlink: {generation: 3, links_per_gpu: 12, switch: true}
"""


@dataclass(frozen=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path: Path, capsys, monkeypatch):
    """Runs `perfmodel predict ...` in a folder of its own, in this process (a new one for each case takes minutes)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "cache"))

    def predict(*args: str) -> Result:
        with pytest.raises(SystemExit) as stopped:
            main(["predict", *args])
        out, err = capsys.readouterr()
        return Result(int(stopped.value.code or 0), out, err)

    return predict


def check_refused(result: Result, *words: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) >= 1
    assert all(len(line) < 600 for line in lines)
    for word in words:
        assert word in result.stderr, f"{word!r} is not in {result.stderr!r}"


MODEL_MISTAKES = [
    ("wrong key", GOOD_MODEL + "batchsize: 3\n", ["batchsize", "did you mean 'batch_size'"]),
    ("wrong type", GOOD_MODEL.replace("batch_size: 64", "batch_size: many"), ["batch_size", "many", "whole number"]),
    ("negative size", GOOD_MODEL.replace("rows: 100", "rows: -100"), ["tables.0.rows", "-100"]),
    ("zero batch", GOOD_MODEL.replace("batch_size: 64", "batch_size: 0"), ["batch_size", "0"]),
    ("nan", GOOD_MODEL.replace("{rows: 100}", "{rows: 100, pooling_factor: .nan}"), ["pooling_factor"]),
    ("duplicate key", GOOD_MODEL + "name: twice\n", ["name", "duplicate key"]),
    ("not yaml", "kind: [dlrm\nname: }", ["line"]),
    ("a list", "- 1\n- 2\n", ["mapping"]),
    ("empty", "", ["empty"]),
    ("unknown kind", GOOD_MODEL.replace("kind: dlrm", "kind: dlmr"), ["kind", "dlmr", "did you mean 'dlrm'"]),
    ("missing key", GOOD_MODEL.replace("dense_features: 4\n", ""), ["dense_features"]),
    ("unknown precision", GOOD_MODEL + "precision: fp42\n", ["precision", "fp42", "amp_bf16"]),
    ("python tag", "kind: !!python/object/apply:os.system ['true']\n", ["not valid YAML", "tag"]),
    ("bad entrypoint text", 'entrypoint: "no colon"\n', ["entrypoint", "package.module:factory"]),
    ("no such module", 'entrypoint: "no_such_module_here:make"\n', ["no_such_module_here"]),
    ("no such factory", 'entrypoint: "user_code:makes"\n', ["makes"]),
    ("factory fails", 'entrypoint: "user_code:broken"\n', ["user_code.py", "division by zero"]),
    ("module fails", 'entrypoint: "user_code:bad_shapes"\n', ["user_code.py"]),
    ("factory returns rubbish", 'entrypoint: "user_code:rubbish"\n', ["user_code:rubbish"]),
]
USER_CODE = textwrap.dedent(
    """
    import torch
    from torch import nn

    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(9, 1)

        def forward(self, x):
            return self.b(self.a(x))

    def make():
        return nn.Linear(4, 1), (torch.zeros(2, 4),), lambda y: y.sum()

    def broken():
        return 1 / 0

    def bad_shapes():
        return Bad(), (torch.zeros(2, 4),), lambda y: y.sum()

    def rubbish():
        return 42
    """
)


@pytest.mark.parametrize(("what", "text", "words"), MODEL_MISTAKES, ids=[m[0] for m in MODEL_MISTAKES])
def test_a_bad_model_file(run, tmp_path: Path, what: str, text: str, words: list[str]) -> None:
    (tmp_path / "m.yaml").write_text(text)
    (tmp_path / "user_code.py").write_text(USER_CODE)
    result = run("--model", "m.yaml", "--topo", "dgx.yaml", "--trace", "out.json")
    check_refused(result, *words)
    assert not (tmp_path / "out.json").exists()


TOPO_MISTAKES = [
    ("bare number", GOOD_TOPO + "network: {switch_latency: 3}\n", ["network.switch_latency", "3"]),
    ("wrong unit", GOOD_TOPO + "network: {switch_latency: 3 GB}\n", ["network.switch_latency", "3 GB"]),
    ("gigabits spelled Gb/s", GOOD_TOPO + "  nics: {count: 2, bandwidth: 200 Gb/s}\n", ["node.nics", "Gbit/s"]),
    ("unknown device", GOOD_TOPO.replace("a100_sxm_40gb", "a100_sxm_44gb"), ["a100_sxm_44gb", "a100_sxm_40gb"]),
    ("negative count", GOOD_TOPO.replace("count: 2", "count: -2"), ["count", "-2"]),
    ("wrong key", GOOD_TOPO.replace("nvlink:", "nvlinks:"), ["nvlinks", "did you mean 'nvlink'"]),
]


@pytest.mark.parametrize(("what", "text", "words"), TOPO_MISTAKES, ids=[m[0] for m in TOPO_MISTAKES])
def test_a_bad_topology_file(run, tmp_path: Path, what: str, text: str, words: list[str]) -> None:
    (tmp_path / "t.yaml").write_text(text)
    (tmp_path / "m.yaml").write_text(GOOD_MODEL)
    check_refused(run("--model", "m.yaml", "--topo", "t.yaml"), *words)


def test_files_that_do_not_exist_get_the_nearest_name(run, tmp_path: Path) -> None:
    check_refused(run("--model", "dlrn.yaml", "--topo", "dgx.yaml"), "dlrn.yaml", "did you mean 'dlrm'")
    check_refused(run("--model", "dlrm.yaml", "--topo", "dgx_a10"), "dgx_a10", "did you mean 'dgx_a100'")


def test_a_huge_file_is_refused_before_it_is_parsed(run, tmp_path: Path) -> None:
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(200 * 1024 * 1024)
    check_refused(run("--model", "huge.yaml", "--topo", "dgx.yaml"), "huge.yaml", "MiB")


def test_a_binary_file_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(bytes(range(256)))
    check_refused(run("--model", "m.yaml", "--topo", "dgx.yaml"), "m.yaml")


def test_a_table_larger_than_any_rank(run, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD_MODEL.replace("rows: 100}", "rows: 30000000000}"))
    check_refused(run("--model", "m.yaml", "--topo", "dgx.yaml"), "30000000000 rows")


def test_a_model_that_does_not_fit_one_rank(run, tmp_path: Path) -> None:
    check_refused(run("--model", "gpt3_175b", "--topo", "a100"), "rank 0", "short by")


def test_a_plan_that_names_what_is_not_there(run, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD_MODEL)
    plan = tmp_path / "p.yaml"
    plan.write_text("embeddings: {t0: 0, t9: 1}\n")
    check_refused(run("--model", "m.yaml", "--topo", "dgx.yaml", "--plan", "p.yaml"), "t9")
    plan.write_text("embeddings: {t0: 0, t1: 8}\n")
    check_refused(run("--model", "m.yaml", "--topo", "dgx.yaml", "--plan", "p.yaml"), "rank 8", "0 to 7")
    check_refused(run("--model", "m.yaml", "--topo", "dgx.yaml", "--plan", "ddq"), "ddq", "ddp")


def test_an_output_that_cannot_be_written(run, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD_MODEL)
    result = run("--model", "m.yaml", "--topo", "a100", "--trace", "no/such/folder/out.json")
    check_refused(result, "no/such/folder/out.json")


def test_all_mistakes_of_a_file_are_reported_at_once(run, tmp_path: Path) -> None:
    text = GOOD_MODEL.replace("batch_size: 64", "batch_size: -1").replace("rows: 100", "row: 100")
    (tmp_path / "m.yaml").write_text(text + "precision: fp42\n")
    result = run("--model", "m.yaml", "--topo", "dgx.yaml")
    check_refused(result, "batch_size", "tables.0.row", "precision")
    assert len(result.stderr.splitlines()) >= 3


def test_a_misspelt_command_and_option(run, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "perfmodel.cli", "predcit"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2
    assert "predict" in result.stderr
    check_refused(run("--model", "dlrm", "--topo", "dgx", "--jsn"), "--json")


def test_a_collective_of_one_rank_is_refused(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["collective", "--topo", "dgx_a100", "--op", "all_reduce", "--group", "0"])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert "--group" in err
