import json
import os

import pytest

from trajectory_guard import files
from trajectory_guard.errors import FileFormatError
from trajectory_guard.files import atomic_write, read_json, write_json

GOOD = {"format": "thing", "version": 1, "value": 0.1}


def test_what_is_written_reads_back_exactly(tmp_path):
    content = {**GOOD, "numbers": [0.1, 1e-300, 2**53, -0.0], "text": "é\n"}
    write_json(tmp_path / "deep" / "a.json", content)
    assert read_json(tmp_path / "deep" / "a.json", format="thing", version=1) == content


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_written(tmp_path, value):
    with pytest.raises(FileFormatError, match="not finite"):
        write_json(tmp_path / "a.json", {**GOOD, "value": value})
    assert not (tmp_path / "a.json").exists()


def test_the_file_has_the_permissions_of_any_new_file(tmp_path):
    write_json(tmp_path / "a.json", GOOD)
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a.json").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ('{"format": "thing"', "not valid JSON"),
        ("[1]", "holds a JSON list"),
        ("3", "holds a JSON int"),
        ('{"version": 1}', "its `format` is None"),
        ('{"format": "thing"}', "its `version` is None"),
        ('{"format": "thing", "version": true}', "its `version` is True"),
        ('{"format": "thing", "version": 0}', "its `version` is 0"),
        ('{"format": "thing", "version": 2}', "newer than 1"),
        ('{"format": "thing", "version": 1, "a": NaN}', "holds NaN"),
        ('{"format": "thing", "version": 1, "a": [1e999]}', "out of float64's range"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_no_file_of_ours_is_refused(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words):
        read_json(path, format="thing", version=1)


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="no such file"):
        read_json(tmp_path / "none.json", format="thing", version=1)
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_json(tmp_path, format="thing", version=1)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="not valid JSON"):
        read_json(tmp_path / "b.json", format="thing", version=1)


def test_a_file_beyond_the_size_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 10)
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    with pytest.raises(FileFormatError, match="more than the limit of 10"):
        read_json(tmp_path / "a.json", format="thing", version=1)
