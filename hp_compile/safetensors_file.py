"""The safetensors format: one or several files of named tensors, written as a stream and read in slices.

A file is eight bytes with the length of the header, a JSON header with dtype, shape and place of every tensor, and their
bytes. Sizes are known before a value is, so a file is written tensor by tensor: ``safetensors.torch.save_file`` wants all
tensors of a file at once, which would bound memory by the size of a file instead of the size of a tensor. Reading goes
through the ``safetensors`` package, which checks the header and maps the file into memory. Several files have an index
beside them, as Hugging Face writes it (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hyper_parallel.errors import HPCompileError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STALE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?(\.tmp)?")

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{c}B": 1000**i for i, c in enumerate("KMGT", 1)}
_UNITS |= {f"{c}IB": 1024**i for i, c in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, before its values are known.

    Attributes:
        name: its name.
        dtype: its dtype.
        shape: its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def format_dtype(self) -> str:
        """Its dtype as the format names it.

        Raises:
            HPCompileError: the format has no such dtype.
        """
        if self.dtype not in _DTYPES:
            raise HPCompileError(
                f"{self.name}: safetensors files have no dtype for {self.dtype}; save it with torch.distributed.checkpoint"
            )
        return _DTYPES[self.dtype]


def bytes_of(size: int | str) -> int:
    """A size in bytes: a number, or a text such as ``"5GB"`` (10⁹ bytes each) or ``"500MiB"`` (2²⁰ each).

    Raises:
        HPCompileError: no such size, or none above 0.
    """
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if isinstance(size, str)
        else None
    )
    unit = _UNITS.get(match[2].upper()) if match else None
    if match and unit:
        found = int(float(match[1]) * unit)
    else:
        found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if found < 1:
        raise HPCompileError(
            f"max_shard_size: expected a number of bytes above 0, or a text such as '5GB' or '500MiB', got {size!r}"
        )
    return found


def split(entries: Iterable[Entry], limit: int) -> dict[str, list[Entry]]:
    """Which tensors go into which file, by its name; a tensor above the limit gets a file of its own.

    Args:
        entries: all tensors, in order.
        limit: largest number of bytes of tensors in a file.
    """
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    for file in files:  # readers want every tensor at a multiple of its item size
        file.sort(key=lambda e: -e.dtype.itemsize)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, 1)
    }


class FolderWriter:
    """Writes a folder of safetensors files, one tensor after another.

    Files have temporary names until :meth:`finish`, which also removes what an earlier save of more or fewer files left.

    Args:
        folder: where to; made if it does not exist.
        files: what goes into which file, from :func:`split`.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = files
        self._open: tuple[str, BinaryIO] | None = None

    def write(self, name: str, entry: Entry, value: torch.Tensor) -> None:
        """Writes the next tensor of :func:`split`'s order.

        Args:
            name: name of the file.
            entry: the tensor's name, dtype and shape.
            value: the tensor; on any device.
        """
        if self._open is None or self._open[0] != name:
            self.close()
            file = (self._folder / f"{name}.tmp").open("wb")
            self._open = name, file
            file.write(_header(self._files[name]))
        if entry.nbytes:
            flat = value.detach().to("cpu").contiguous().reshape(-1)
            self._open[1].write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def finish(self) -> None:
        """Gives the files their names, and writes the index."""
        self.close()
        for name in self._files:
            os.replace(self._folder / f"{name}.tmp", self._folder / name)
        kept = set(self._files)
        if len(kept) > 1:
            kept.add(INDEX)
            where = {entry.name: name for name, file in self._files.items() for entry in file}
            total = sum(entry.nbytes for file in self._files.values() for entry in file)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            path = self._folder / INDEX
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in self._folder.iterdir():
            if path.name not in kept and _STALE.fullmatch(path.name):
                path.unlink()


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        stop = start + entry.nbytes
        place = {"shape": list(entry.shape), "data_offsets": [start, stop]}
        header[entry.name] = {"dtype": entry.format_dtype, **place}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------ reading


class Reader:
    """Slices of the tensors in one or several safetensors files; a context manager.

    Args:
        source: a folder with ``model.safetensors`` or an index, a ``.safetensors`` file, or an index.

    Attributes:
        files: which file each tensor is in, by name.

    Raises:
        FileNotFoundError: there is no such file, or a file that the index names is not there.
        HPCompileError: the ``safetensors`` package is not installed, or the index names a tensor that its file lacks.
    """

    def __init__(self, source: Path) -> None:
        self._open = _safe_open()
        self._stack = contextlib.ExitStack()
        self._handles: dict[Path, Any] = {}
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            self.files = self._find(source)
            undo.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def slices(self, name: str) -> Any:
        """The tensor with ``get_shape()``, ``get_dtype()`` and indexing by slices, which reads only what it has to."""
        return self._handles[self.files[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.slices(name).get_shape())

    def _find(self, source: Path) -> dict[str, Path]:
        if source.is_dir():
            inside = [source / name for name in (SINGLE, INDEX) if (source / name).is_file()]
            if not inside:
                raise FileNotFoundError(f"{source}: holds neither {SINGLE} nor {INDEX}")
            source = inside[0]
        if not source.is_file():
            raise FileNotFoundError(f"{source}: no such file or folder")
        if source.suffix != ".json":
            return dict.fromkeys(self._handle(source).keys(), source)
        where = json.loads(source.read_text(encoding="utf-8"))["weight_map"]
        files = {name: source.parent / file for name, file in where.items()}
        gone = sorted({str(path) for path in files.values() if not path.is_file()})
        if gone:
            raise FileNotFoundError(
                f"{source.name} names files that are not there: {', '.join(gone)}"
            )
        held = {path: set(self._handle(path).keys()) for path in set(files.values())}
        lost = [name for name, path in files.items() if name not in held[path]]
        if lost:
            raise HPCompileError(
                f"{source}: says that {lost[0]} is in {files[lost[0]].name}, which lacks it"
            )
        return files

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(self._open(path, framework="pt"))
        return self._handles[path]


def read(view: Any, ranges: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """The rows of a tensor in ranges of each dim, side by side.

    Args:
        view: from :meth:`Reader.slices`.
        ranges: for each dim ``(start, stop)`` pairs.
    """

    def along(chosen: tuple[slice, ...]) -> torch.Tensor:
        if len(chosen) == len(ranges):
            return view[chosen] if chosen else view[...]
        parts = [along((*chosen, slice(a, b))) for a, b in ranges[len(chosen)]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))

    return along(())


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise HPCompileError(
            "reading safetensors files needs the safetensors package: pip install 'hyper-parallel[safetensors]'"
        ) from error
    return safe_open
