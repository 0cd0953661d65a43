"""The tutorial, literally: files it shows are saved, commands it shows are run in an empty folder, outputs compared.

A documented line matches an output line if the words are the same and every figure is near: `...` matches anything within a
line, and any lines where it stands alone. Figures move as calibrations change, so they may be off by FACTOR.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
FACTOR = 2.0
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
TO_BASE = {"ms": 1e3, "us": 1e0, "s": 1e6, "ns": 1e-3}


def figures(line):
    """Numbers of a line; times in microseconds, so that 900 us is near 1.1 ms."""
    found = []
    for match in FIGURE.finditer(line):
        unit = re.match(r" (ms|us|ns|s)\b", line[match.end() :])
        found.append(float(match[0]) * (TO_BASE[unit[1]] if unit else 1.0))
    return found


def skeleton(line):
    """The line without figures, units of time and runs of spaces."""
    return re.sub(r"\s+", " ", re.sub(r"# (ms|us|ns|s)\b", "#", FIGURE.sub("#", line))).strip()


def near(a, b):
    return a == b or (min(a, b) > 0 and max(a, b) / min(a, b) <= FACTOR)


def matches(documented, line):
    parts = documented.split("...")
    if len(parts) == 1:
        a, b = figures(documented), figures(line)
        return skeleton(documented) == skeleton(line) and all(near(x, y) for x, y in zip(a, b, strict=True))
    pattern = ".*".join(re.escape(skeleton(part)) for part in parts)
    if re.fullmatch(pattern, skeleton(line)) is None:
        return False
    return all(map(near, figures(parts[0]), figures(line)))


def compare(documented, output):
    """The first documented line that the output does not have in its place, or None."""
    lines = [line for line in output.splitlines() if line.strip()]
    place, anywhere = 0, False
    for wanted in (line for line in documented if line.strip()):
        if wanted.strip() == "...":
            anywhere = True
            continue
        found = next((i for i in range(place, len(lines)) if matches(wanted, lines[i])), None)
        if found is None or (found > place and not anywhere):
            return wanted
        place, anywhere = found + 1, False
    return None if anywhere or place == len(lines) else f"end of output, before: {lines[place]}"


def sessions(block):
    """(command, documented output lines) of a console block."""
    found = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def run(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": path},
    )
    return done.stdout + done.stderr + (f"[exit {done.returncode}]\n" if done.returncode else "")


def test_the_tutorial_does_what_it_says(tmp_path):
    commands = 0
    for language, title, body in BLOCK.findall(TUTORIAL.read_text()):
        if title:
            (tmp_path / title).write_text(body)
        for command, documented in sessions(body) if language == "console" else ():
            commands += 1
            output = run(command, tmp_path)
            wrong = compare(documented, output)
            assert wrong is None, f"$ {command}\nnot found: {wrong}\n--- output ---\n{output}"
    assert commands >= 9
    assert {path.name for path in tmp_path.glob("*.html")} == {"report.html", "compare.html", "plans.html"}


@pytest.mark.parametrize(
    ("documented", "output", "wrong"),
    [
        (["time 4.9 ms"], "time 5.1 ms", None),
        (["time 4.9 ms"], "time 10 ms", "time 4.9 ms"),  # a figure that is far off
        (["time 900 us"], "time 1.1 ms", None),
        (["time 4.9 ms"], "times 4.9 ms", "time 4.9 ms"),  # another word
        (["a", "c"], "a\nb\nc", "c"),  # a line that the page does not show
        (["a", "...", "c"], "a\nb\nc", None),
        (["a"], "a\nb", "end of output, before: b"),
        (["a 1, ..."], "a 1, b 2", None),
    ],
)
def test_the_comparison_finds_what_is_wrong(documented, output, wrong):
    assert compare(documented, output) == wrong
