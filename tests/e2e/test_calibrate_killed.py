"""A calibration that is killed while it measures: what was measured stays, nothing is half-written, the next run goes on."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from calibrate.cases import draw_cases
from calibrate.session import COLUMNS, RoundLog

SHARE = 0.1
WAIT_S = 60.0


def command(out: Path) -> list[str]:
    options = ["--device", "cpu", "--families", "random", "--share", str(SHARE), "--out", str(out), "--threads", "1"]
    return [sys.executable, "-m", "perfmodel", "calibrate", "kernels", *options]


def lines(out: Path) -> list[str]:
    log = out / "rounds" / "random.csv"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    running = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + WAIT_S
    while len(lines(tmp_path)) < 4 and running.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    before = [row for row in lines(tmp_path) if row.count(",") == len(COLUMNS) - 1]
    assert len(before) >= 4
    assert not list(tmp_path.glob("*.fit.*"))

    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert "fitting" in done.stderr
    after = lines(tmp_path)
    assert after[: len(before)] == before
    # Every case of the plan has its three rounds once, those from before the kill among them.
    seen = [(item.key, item.number) for item in RoundLog(tmp_path, "random").read()]
    assert len(seen) == len(set(seen))
    assert {(case.key, number) for case in draw_cases("random", share=SHARE) for number in range(3)} <= set(seen)
    with (tmp_path / "random.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len({key for key, _ in seen})
    assert not list(tmp_path.rglob("*.tmp"))
