import csv
import re
from pathlib import Path

import pytest

from perfmodel import units

GOLDEN = Path(__file__).parents[1] / "golden" / "units.csv"
PARSERS = {
    "bytes": units.parse_bytes,
    "bytes_per_s": units.parse_bytes_per_s,
    "s": units.parse_seconds,
    "flop": units.parse_flops,
    "flop_per_s": units.parse_flops_per_s,
    "hz": units.parse_hz,
    "w": units.parse_watts,
    "count": units.parse_count,
}


def golden_rows():
    with GOLDEN.open(encoding="utf-8") as file:
        return [(row["kind"], row["text"], float(row["value"])) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("kind", "text", "value"), golden_rows())
def test_golden_table(kind, text, value):
    assert PARSERS[kind](text) == value


def test_the_golden_table_has_every_size_prefix():
    seen = {re.sub(r"[\d._e\s]", "", text) for kind, text, _ in golden_rows() if kind == "bytes"}
    assert seen == set(units.SIZE_UNITS)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.parse_bytes, 80, "bare number"),
        (units.parse_bytes, "80", "bare number"),
        (units.parse_bytes, "80 Gb", "bits or bytes"),
        (units.parse_bytes, "80 GB/s", "unknown unit 'GB/s'"),
        (units.parse_bytes, "-1 GiB", "not negative"),
        (units.parse_bytes, "many GiB", "found 'many GiB'"),
        (units.parse_bytes, "1 KB", "write k for 1000, Ki for 1024"),
        (units.parse_bytes, "nan GiB", "found 'nan GiB'"),
        (units.parse_bytes, True, "found True, allowed"),
        (units.parse_bytes, None, "found None, allowed"),
        (units.parse_bytes, "1 GiBs", "did you mean 'GiB'?"),
        (units.parse_bytes_per_s, "200 Gb/s", "write Gbit/s or GB/s"),
        (units.parse_bytes_per_s, "200 Gbps", "write Gbit/s or GB/s"),
        (units.parse_bytes_per_s, "200 GB", "unknown unit 'GB'"),
        (units.parse_seconds, "inf s", "found 'inf s'"),
        (units.parse_seconds, "2 sec", "unknown unit 'sec'"),
        (units.parse_flops_per_s, "312 TFLOPS", "a rate is written TFLOP/s"),
        (units.parse_count, "1.5", "allowed a whole number"),
        (units.parse_count, 1.5, "allowed a whole number"),
        (units.parse_count, "-3", "not negative"),
        (units.parse_count, "40 MB", "unknown unit 'MB'"),
    ],
)
def test_what_is_refused_is_explained(parse, text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(1023), "1023 B"),
        (units.format_bytes(1024), "1.00 KiB"),
        (units.format_bytes(80 * 2**30), "80.0 GiB"),
        (units.format_bytes(26214400, digits=None), "25 MiB"),
        (units.format_bytes(26214401, digits=None), "26214401 B"),
        (units.format_rate(25e9, digits=None), "25 GB/s"),
        (units.format_time(0.0), "0 s"),
        (units.format_time(9.9996e-4), "1.00 ms"),
        (units.format_time(999.6e-6), "1.00 ms"),
        (units.format_time(0.0123456), "12.3 ms"),
        (units.format_time(4e-10), "0.40 ns"),
        (units.format_time(1234.5), "1234 s"),
        (units.format_time(2.5e-6, digits=None), "2500 ns"),
        (units.format_count(8_030_261_248), "8.03G"),
        (units.format_flops_per_s(312e12), "312 TFLOP/s"),
        (units.format_hz(1.41e9), "1.41 GHz"),
    ],
)
def test_printing(text, expected):
    assert text == expected
