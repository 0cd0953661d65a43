"""Pictures and tables of topologies."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from perfmodel.config import load_topology
from perfmodel.errors import ConfigError
from perfmodel.report.topology import draw_topology
from perfmodel.topology import Topology, build_topology
from perfmodel.topology.draw import render_bottleneck, render_matrix, render_pair, shown_ranks
from perfmodel.topology.smi_matrix import parse_smi_matrix


def machine(name: str) -> Topology:
    return build_topology(load_topology(name))


def test_matrix_of_a_cube_mesh() -> None:
    text = render_matrix(machine("dgx1_v100"))
    lines = text.splitlines()
    assert lines[1].split() == ["0", "X", "NV1", "NV1", "NV2", "NV2", "NVB", "NVB", "NVB", "h0/gpu0"]
    table = text.split("\n\n")[1].splitlines()
    assert table[0].split() == ["GB/s", *map(str, range(8))]
    assert table[1].split() == ["0", "-", "22.6", "22.6", "45.2", "45.2", "22.6", "22.6", "45.2"]
    assert "NVB" in text.split("\n\n")[-1]


def test_the_printed_nvlink_labels_read_as_a_matrix_again() -> None:
    first = render_matrix(machine("dgx_a100")).split("\n\n")[0].splitlines()
    rows = [line.split()[:9] for line in first]
    renamed = [["GPU" + row[0], *row[1:]] for row in rows[1:]]
    text = "\n".join(" ".join(row) for row in [[f"GPU{i}" for i in range(8)], *renamed])
    assert set(parse_smi_matrix(text).label.values()) == {"NV12"}


def test_a_question_mark_where_only_a_measurement_can_tell() -> None:
    node = {"gpus": {"count": 2, "device": "a10g"}, "pcie": {"generation": 4, "host_bridges": 1, "hidden": True}}
    text = render_matrix(build_topology(load_topology({"name": "vm", "node": node})))
    assert text.splitlines()[1].split() == ["0", "X", "?", "h0/gpu0"]


def test_a_large_machine_shows_one_host_and_its_ways_out() -> None:
    large = build_topology(load_topology("dgx_h100_x2").with_nodes(64))
    assert shown_ranks(large) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 511)
    assert len(render_matrix(large).splitlines()) < 45


def test_pair_lists_every_link() -> None:
    lines = render_pair(machine("dgx_h100_x2"), 0, 9).splitlines()
    assert lines[0].startswith("rank 0 (h0/gpu0) to rank 9 (h1/gpu1): NET, 48.5 GB/s one way")
    assert len(lines) == 1 + 8  # GPU, PCIe switch, NIC, leaf, spine, leaf, NIC, PCIe switch, GPU
    assert render_pair(machine("v100"), 0, 0) == "rank 0 (h0/gpu0) to rank 0 (h0/gpu0): X\n"


def test_bottleneck_in_words() -> None:
    # Four ranks on each side: 4 x 4 pairs cross one way, so each rank sends 7/16 of the link's rate.
    text = render_bottleneck(machine("pcie_8xl40s"), range(8))
    assert "h0/numa0>h0/numa1" in text
    assert "shared by 16 of the pairs" in text
    assert "each rank sends 9.62 GB/s" in text
    assert render_bottleneck(machine("v100"), [0]) == "a group of one rank sends nothing\n"


@pytest.mark.parametrize("name", ["dgx1_v100", "dgx_h100_x2", "gb200_nvl72", "pcie_8xl40s", "cpu_x2", "t4"])
def test_figures_are_drawn_and_equal_bytes_come_out_twice(name: str, tmp_path: Path) -> None:
    box = machine(name)
    for file in ("a.svg", "b.svg"):
        draw_topology(box, tmp_path / file, group=range(box.n_ranks))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    first = min(box.n_ranks, len(box.hosts()[0]))
    assert all(f"rank {rank}" in text for rank in range(first))
    assert ("bottleneck" in text) == (box.n_ranks > 1)


def test_png_is_a_png(tmp_path: Path) -> None:
    draw_topology(machine("4xv100"), tmp_path / "box.png")
    assert (tmp_path / "box.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_figures_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = machine("t4")
    with pytest.raises(ConfigError, match=r"found suffix '.bmp', allowed .svg, .png, .pdf"):
        draw_topology(box, tmp_path / "box.bmp")
    with pytest.raises(ConfigError, match="cannot write"):
        draw_topology(box, tmp_path / "nowhere" / "box.svg")
    assert list(tmp_path.iterdir()) == []
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigError, match=r"pip install 'perfmodel\[plot\]'"):
        draw_topology(box, tmp_path / "box.svg")
