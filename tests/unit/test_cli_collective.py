"""`perfmodel collective` as people call it."""

import json

import pytest
from click.testing import CliRunner

from perfmodel.cli.collective import collective, parse_sizes
from perfmodel.errors import ConfigError


def run(*args):
    return CliRunner().invoke(collective, list(args), catch_exceptions=True)


def test_the_table_has_a_line_for_each_size_from_1k_to_8g():
    found = run("--topo", "dgx_a100", "--op", "all_reduce", "--sizes", "1K:8G", "--group", "0-7")
    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.output.splitlines() if not line.startswith("#")]
    assert [int(line[0]) for line in lines] == [1024 << i for i in range(24)]
    assert float(lines[-1][3]) == pytest.approx(226, rel=0.05)  # DGX A100, 8 GiB: 226-232 GB/s of bus bandwidth


def test_json_has_a_schema_version_and_si_units():
    found = run("--topo", "dgx_h100", "--sizes", "1M", "--json")
    body = json.loads(found.output)
    assert body["schema_version"] == 1
    (row,) = body["rows"]
    assert row["bytes"] == 2**20
    assert 1e-5 < row["time_s"] < 1e-4


@pytest.mark.parametrize("text", ["", "8X", "4K:1K", "1K:1M:1", "1:2:3:4", "-1"])
def test_bad_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text)


def test_uneven_exchanges_are_for_python():
    found = run("--topo", "dgx_a100", "--op", "all_to_all_v")
    assert isinstance(found.exception, ConfigError)
