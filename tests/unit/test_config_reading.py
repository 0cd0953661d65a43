import re
from pathlib import Path

import pytest

from perfmodel.config.loading import Spec, find_config, validate
from perfmodel.config.quantity import Bytes, BytesPerS, Count
from perfmodel.config.reading import MAX_CONFIG_BYTES, check_mapping, read_mapping
from perfmodel.errors import ConfigError

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def problems_of(tmp_path, text, name="file.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_mapping(path)
    assert all(str(path) in line or "nested deeper" in line for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("- 1\n- 2\n", "found a list, allowed a mapping"),
        ("just words", "found text, allowed a mapping"),
        ("a: 1\nb: 2\na: 3\n", "a: duplicate key at line 3"),
        ("a: {b: 1, b: 2}", "b: duplicate key at line 1"),
        ("a: [1, 2\nb: 3", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: .nan", "a: found nan, allowed a finite number"),
        ("a: [1, .inf]", "a.1: found inf, allowed a finite number"),
        ("1: a", "found the key 1, allowed text"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2", "not valid YAML: but found another document"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file"),
        (b"a: \x00", "NUL byte"),
        (b"#" * (MAX_CONFIG_BYTES + 1), "allowed a config file of at most 4 MiB"),
        ("a: &a [*a]", "nested deeper than"),
        ("[" * 100_000, "exceeded maximum nesting depth"),
        (LAUGHS, "values once its aliases are expanded"),
        ("? [1, 2]\n: 3", "not"),
    ],
)
def test_a_bad_file_gives_one_clear_line(tmp_path, text, says):
    problems = problems_of(tmp_path, text)
    assert len(problems) == 1
    assert says in problems[0]
    assert "\n" not in problems[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ('{"a": 1, "a": 2}', "a: duplicate key"),
        ('{"a": NaN}', "a: found nan"),
        ("[" * 100_000, "not usable JSON"),
    ],
)
def test_a_bad_json_file_gives_one_clear_line(tmp_path, text, says):
    problems = problems_of(tmp_path, text, "file.json")
    assert len(problems) == 1
    assert says in problems[0]


def test_all_duplicates_come_at_once(tmp_path):
    assert len(problems_of(tmp_path, "a: 1\na: 2\nb: {c: 1, c: 2}\n")) == 2


def test_scalars_are_read_as_yaml_1_2(tmp_path):
    path = tmp_path / "scalars.yaml"
    path.write_text(
        "on: yes\ntime: 12:30:45\nfloat: 1e9\nbig: 3.35e12\noctal: 0777\nday: 2026-01-01\n"
        "empty:\nno: [true, ~, 1_000]\n"
    )
    assert read_mapping(path) == {
        "on": "yes",
        "time": "12:30:45",
        "float": 1e9,
        "big": 3.35e12,
        "octal": 777,
        "day": "2026-01-01",
        "empty": None,
        "no": (True, None, 1000),
    }


def test_aliases_and_merges_work(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text("base: &b {x: 1, y: 2}\nother: {<<: *b, y: 3}\n")
    assert read_mapping(path)["other"] == {"x": 1, "y": 3}


def test_a_mapping_from_python_is_held_to_the_same_rules():
    with pytest.raises(ConfigError, match="found inf"):
        check_mapping({"a": float("inf")}, "here")
    assert check_mapping({"a": [1, [2]]}, "here") == {"a": (1, (2,))}


def test_a_missing_file_names_the_nearest_shipped_one():
    with pytest.raises(ConfigError, match=re.escape("nope.yaml: no such file")):
        find_config("models", "nope.yaml")


def test_a_folder_is_not_a_config(tmp_path):
    with pytest.raises(ConfigError, match="found a folder"):
        find_config("models", tmp_path)


def test_a_folder_of_the_same_name_does_not_hide_a_shipped_model(tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_config("models", "gpt2").name == "gpt2.yaml"
    (tmp_path / "gpt2.yaml").write_text("kind: vision\n")
    assert find_config("models", "gpt2.yaml") == Path("gpt2.yaml")


def test_a_name_too_long_for_the_file_system_is_one_clear_line():
    with pytest.raises(ConfigError, match=r"cannot be looked up|no such file"):
        find_config("models", "x" * 5000)


class Inner(Spec):
    size: Bytes
    rate: BytesPerS


class Outer(Spec):
    name: str
    count: Count
    inners: tuple[Inner, ...] = ()


def test_every_mistake_is_reported_with_its_place():
    bad = {"nam": "x", "count": 1.5, "inners": ({"size": 3, "rate": "1 Gb/s", "sise": 1}, 7)}
    with pytest.raises(ConfigError) as caught:
        validate(Outer, bad, "f.yaml")
    assert sorted(caught.value.problems) == [
        "f.yaml: count: found 1.5, allowed a whole number such as 40000000 or '40M'",
        "f.yaml: inners.0.rate: found '1 Gb/s', allowed a rate such as '3.35 TB/s' or '200 Gbit/s'; "
        "'Gb/s' is refused: is it bits or bytes? write Gbit/s or GB/s",
        "f.yaml: inners.0.sise: unknown key, allowed size, rate; did you mean 'size'?",
        "f.yaml: inners.0.size: found 3 (a bare number has no unit), allowed a size such as '80 GiB'",
        "f.yaml: inners.1: found 7, allowed a mapping of keys to values",
        "f.yaml: nam: unknown key, allowed name, count, inners; did you mean 'name'?",
        "f.yaml: name: missing, needs text",
    ]
