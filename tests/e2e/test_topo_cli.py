"""`perfmodel topo import` and `topo show` as a person types them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perfmodel.cli import cli
from perfmodel.config import load_topology
from perfmodel.errors import PerfModelError

MATRIX = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\t X \t\t

NIC Legend:

  NIC0: mlx5_0
"""


def run(*args: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["topo", *args], input=text)


def test_import_from_stdin_writes_a_file_that_loads(tmp_path: Path) -> None:
    result = run("import", "-", "--gpu", "a100_sxm_80gb", "--name", "pair", "--nic", "roce", "--nic-rate", "100 Gbit/s",
                 text=MATRIX)  # fmt: skip
    assert result.exit_code == 0, result.output
    path = tmp_path / "pair.yaml"
    path.write_text(result.stdout)
    spec = load_topology(path)
    assert spec.name == "pair"
    assert spec.node is not None
    assert spec.node.nics is not None
    assert spec.node.nics.names == ("mlx5_0",)
    assert spec.node.nics.bandwidth == 12.5e9
    assert "inter_socket" in result.stderr
    assert result.stdout.startswith("# the matrix does not name the CPUs")


def test_import_takes_aliases_and_a_second_matrix(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n")
    (tmp_path / "p.txt").write_text("\tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n")
    out = tmp_path / "box.yaml"
    result = run("import", str(tmp_path / "m.txt"), "--gpu", "NVIDIA L4", "--p2p", str(tmp_path / "p.txt"),
                 "--out", str(out))  # fmt: skip
    assert result.exit_code == 0, result.output
    spec = load_topology(out)
    assert spec.node is not None
    assert spec.node.devices == ("l4", "l4")
    assert spec.node.p2p.disabled


def test_import_of_a_gpu_whose_speed_is_unknown_says_so() -> None:
    result = run("import", "-", "--gpu", "h20", text="GPU0\nGPU0 X\n")
    assert result.exit_code == 0, result.output
    assert "kernel times are not" in result.stderr


@pytest.mark.parametrize(
    ("args", "text", "words"),
    [
        (("import", "-", "--gpu", "abacus"), "GPU0\nGPU0 X\n", "GPU model: found 'abacus'"),
        (("import", "-", "--gpu", "t4"), "no matrix here", "no column GPU0"),
        (("import", "/no/such/file", "--gpu", "t4"), None, "/no/such/file: cannot read"),
        (("import", "-", "--gpu", "a100_sxm_80gb", "--nic", "roce", "--nic-rate", "100"), MATRIX, "bare number"),
        (("import", "-", "--gpu", "a100_sxm_80gb", "--nic", "pigeon"), MATRIX, "pigeon"),
        (("import", "-", "--gpu", "a100_sxm_80gb", "--nic", "roce"), MATRIX, "bandwidth"),
        (("show", "dgx_a10"), None, "did you mean 'dgx_a100'"),
        (("show", "dgx_a100", "--pair", "0"), None, "--pair: found '0'"),
        (("show", "dgx_a100", "--pair", "0,99"), None, "allowed ranks 0 to 7"),
        (("show", "dgx_a100", "--group", "x"), None, "--group: found 'x'"),
        (("show", "dgx_a100", "--nodes", "0"), None, "nodes: found 0"),
        (("show", "dgx_a100", "--figure", "a.gif"), None, "found suffix '.gif'"),
    ],
)
def test_mistakes_are_one_line(args: tuple[str, ...], text: str | None, words: str) -> None:
    result = run(*args, text=text)
    assert isinstance(result.exception, PerfModelError), result.output
    assert words in str(result.exception)


def test_show_prints_the_matrix_a_pair_and_a_bottleneck() -> None:
    assert "NV12" in run("show", "dgx_a100").stdout
    assert "NET, 48.5 GB/s one way" in run("show", "dgx_h100", "--nodes", "2", "--pair", "0,8").stdout
    both = run("show", "pcie_8xl40s", "--pair", "0,1", "--group", "0-7").stdout
    assert "PIX, 26.2 GB/s" in both
    assert "bottleneck of 8 ranks" in both


def test_show_json_and_figure(tmp_path: Path) -> None:
    result = run(
        "show", "gb200_nvl72", "--json", "--pair", "0,71", "--group", "0,71", "--figure", str(tmp_path / "a.svg")
    )
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    assert answer["topology"]["gpus_per_host"] == 4
    assert answer["topology"]["gpus_per_nvlink_domain"] == 72
    assert answer["topology"]["nvlink_domains"] == ["0-71"]
    assert answer["pairs"][0]["path"] == "nvswitch"
    assert answer["bottleneck"]["link"]["kind"] == "nvlink5"
    assert (tmp_path / "a.svg").exists()
