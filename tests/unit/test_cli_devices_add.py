"""`perfmodel devices add` says from which device each family's efficiencies come."""

from pathlib import Path

from click.testing import CliRunner

from perfmodel.cli.devices import devices
from perfmodel.db.loading import db_root


def test_each_family_names_the_device_it_comes_from(tmp_path: Path) -> None:
    text = (db_root() / "h100_pcie" / "device.yaml").read_text(encoding="utf-8")
    sheet = tmp_path / "mine.yaml"
    lines = (line for line in text.splitlines() if not line.startswith(("aliases:", "title:", "nearest:")))
    sheet.write_text("\n".join(lines).replace("name: h100_pcie", "name: mine\ntitle: Mine", 1), encoding="utf-8")
    result = CliRunner().invoke(devices, ["add", str(sheet), "--db", str(tmp_path / "db")])
    assert result.exit_code == 0, result.output
    # H100 SXM is the measured Hopper with the same chip; softmax was never measured on one.
    assert "gemm from h100_sxm" in result.output
    assert "softmax from a100" in result.output
