"""The safetensors format: what is written is what the `safetensors` package reads."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_compile import HPCompileError
from hp_compile.safetensors_file import Entry, FolderWriter, Reader, bytes_of, read, split

safetensors = pytest.importorskip("safetensors")

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool,
)  # fmt: skip


def write(folder: Path, tensors: dict[str, Tensor], limit: int) -> dict[str, list[Entry]]:
    files = split([Entry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], limit)
    writer = FolderWriter(folder, files)
    for name, entries in files.items():
        for entry in entries:
            writer.write(name, entry, tensors[entry.name])
    writer.finish()
    return files


def load(folder: Path, files: Any) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {n: t for file in files for n, t in load_file(folder / file).items()}


@pytest.mark.parametrize("limit", [1, 40, 10**6])
def test_every_dtype_and_shape_comes_back(limit: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(d): (torch.rand(3, 5) * 3).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "one": torch.tensor([True])}
    tensors |= {"turned": torch.rand(4, 3).t(), 'ümlaut "quoted"': torch.rand(7)}
    files = write(tmp_path, tensors, limit)
    found = load(tmp_path, files)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        mine, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (value, found[name]))
        assert torch.equal(mine, theirs), name
    kept = set(files) | ({"model.safetensors.index.json"} if len(files) > 1 else set())
    assert {path.name for path in tmp_path.iterdir()} == kept
    with Reader(tmp_path) as reader:
        assert reader.files == {e.name: tmp_path / f for f, es in files.items() for e in es}
        piece = read(reader.slices("torch.float32"), [[(0, 1), (2, 3)], [(1, 2), (3, 5)]])
        assert torch.equal(piece, tensors["torch.float32"][[0, 2]][:, [1, 3, 4]])
        assert read(reader.slices("torch.int8"), [[(0, 0)], [(0, 5)]]).shape == (0, 5)
        assert read(reader.slices("scalar"), []) == 2.5


def test_files_are_as_large_as_asked_and_replace_older_ones(tmp_path: Path) -> None:
    tensors = {str(i): torch.full((10,), float(i)) for i in range(7)}
    (tmp_path / "config.json").write_text("{}")
    files = write(tmp_path, tensors, 100)
    assert [len(entries) for entries in files.values()] == [2, 2, 2, 1]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))
    assert index["metadata"]["total_size"] == 280
    assert index["weight_map"]["2"] == "model-00002-of-00004.safetensors"
    write(tmp_path, tensors, 1000)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    write(tmp_path, {"large": torch.zeros(500), "small": torch.zeros(1)}, 1000)
    assert (tmp_path / "model-00002-of-00002.safetensors").is_file()
    assert not (tmp_path / "model.safetensors").exists()


def test_sizes() -> None:
    assert bytes_of(5) == 5
    assert bytes_of("5GB") == 5 * 10**9 and bytes_of("1.5 MiB") == 1.5 * 2**20
    for wrong in (0, -1, "5 apples", "", "0GB", True, 2.5):
        with pytest.raises(HPCompileError, match="max_shard_size: expected"):
            bytes_of(wrong)  # type: ignore[arg-type]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        Reader(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        Reader(tmp_path / "nowhere")
    write(tmp_path, {"a": torch.zeros(3), "b": torch.ones(3)}, 12)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text("utf-8")
    index.write_text(text.replace('"b"', '"c"'), "utf-8")
    with pytest.raises(
        HPCompileError, match=r"c is in model-00002-of-00002\.safetensors, which lacks"
    ):
        Reader(tmp_path)
    index.write_text(text, "utf-8")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"names files that are not there: .*00002-of-00002"
    ):
        Reader(index)
    with Reader(tmp_path / "model-00001-of-00002.safetensors") as reader:
        assert set(reader.files) == {"a"}


def test_without_the_package_reading_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a": torch.zeros(3)}, 12)  # writing does not need it
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "safetensors":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(HPCompileError, match=r"pip install 'hyper-parallel\[safetensors\]'"):
        Reader(tmp_path)
