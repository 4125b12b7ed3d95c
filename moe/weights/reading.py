"""Tensors in safetensors files: what a directory holds, and any rectangle of a matrix as fp32.

A directory has `STEM.safetensors`, or `STEM.safetensors.index.json` and the files that it names;
STEM is `model` for weights. Everything in them is data of unknown origin: sizes are checked before
they are used, an index cannot name a file outside its directory, and only plain files are read.

The safetensors library checks each file's header. The bytes are read with `pread` all the same: the
library hands out no bfloat16 in NumPy, and a mapped file counts as resident memory and turns an I/O
error into a signal. Memory beyond the caller's is a scratch of `SCRATCH_BYTES` and its conversion.

Knows names and bytes, not models. Not safe for use by several threads at once.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from moe.weights.names import Place, Stored
from moe.weights.plain_files import open_plain, parse_json, read_plain
from offload.nvme.files import describe_os_error
from ops.errors import ConfigError, StorageError

MARKER_SUFFIX = ".safetensors.index.json.unfinished"
"""Of the file that marks an export which has not come to its end."""

SCRATCH_BYTES = 8 << 20
_INDEX_BYTES_MAX = 256 << 20
_HEADER_BYTES_MAX = 100_000_000  # the library's own limit
_OPEN_MAX = 16
_PAGE_BYTES = 4096
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredTensor(Stored):
    """A tensor in a file: its first byte is at `offset`."""

    path: str
    offset: int


class WeightFiles:
    """The tensors of one directory. `tensors` maps names to where they are."""

    def __init__(self, directory: str, key: str, stem: str = "model") -> None:
        """Read index and headers; `key` (an option or a configuration key) begins every message.

        Raises ConfigError when files are missing, damaged, or those of an unfinished export. May
        block for reading the headers.
        """
        self.directory = directory
        self.key = key
        self.bytes_read = 0
        self.tensors: dict[str, StoredTensor] = {}
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)
        self._open: OrderedDict[str, int] = OrderedDict()
        refuse_unfinished(directory, key, stem)
        index = os.path.join(directory, f"{stem}.safetensors.index.json")
        single = os.path.join(directory, f"{stem}.safetensors")
        if os.path.lexists(index):
            self._read_indexed(index)
        elif os.path.lexists(single):
            self.tensors = self._read_header(single)
        else:
            raise self._refuse(f"it has neither {stem}.safetensors nor {os.path.basename(index)}")

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, place: Place, rows: slice, columns: slice, out: F32) -> None:
        """Fill `out`, fp32 [rows, columns], with that rectangle of the matrix at `place`.

        Reads no more of the files than that, rounded to pages. Raises ConfigError for values that
        are not finite, StorageError when a file cannot be read.
        """
        stored = self.tensors[place.tensor]
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        first = place.first + rows.start * place.row_stride + columns.start * place.col_stride
        if place.col_stride == 1:
            lines = _Lines(first, num_rows, place.row_stride, num_columns)
            self._read_lines(place.tensor, stored, lines, out)
        else:  # stored transposed
            lines = _Lines(first, num_columns, place.col_stride, num_rows)
            self._read_lines(place.tensor, stored, lines, out.T)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors of one shape hold the same numbers; reads both, piece by piece."""
        sizes = {prod(self.tensors[x].shape) for x in (name, other)}
        if len(sizes) != 1:
            return False
        (size,) = sizes
        step = SCRATCH_BYTES // 4
        values = np.empty((2, 1, min(step, size)), np.float32)
        for start in range(0, size, step):
            stop = min(start + step, size)
            for x, row in zip((name, other), values):
                place = Place(x, 0, size, 1)
                self.read(place, slice(0, 1), slice(start, stop), row[:, : stop - start])
            if not np.array_equal(values[0, :, : stop - start], values[1, :, : stop - start]):
                return False
        return True

    def _read_lines(self, name: str, stored: StoredTensor, lines: _Lines, out: F32) -> None:
        """Fill `out` [lines, length], a batch of lines at a time."""
        item = _ITEM_BYTES[stored.dtype]
        gap_bytes = (lines.stride - lines.length) * item
        together = lines.count == 1 or gap_bytes < _PAGE_BYTES  # what lies between costs nothing
        width = lines.stride if together else lines.length
        step = max(1, SCRATCH_BYTES // max(1, width * item))
        for start in range(0, lines.count, step):
            count = min(step, lines.count - start)
            at = lines.first + start * lines.stride
            for lo in range(0, lines.length, SCRATCH_BYTES // item):  # more than once: one line
                length = min(lines.length - lo, SCRATCH_BYTES // item)
                raw = self._read_batch(stored, _Lines(at + lo, count, lines.stride, length), item)
                target = out[start : start + count, lo : lo + length]
                _convert(raw, stored.dtype, target)
                is_finite = np.isfinite(target)
                if not is_finite.all():
                    line, element = divmod(int(is_finite.argmin()), length)
                    flat = at + line * lines.stride + lo + element
                    raise self._refuse(
                        f"{name} has values that are not finite numbers, the first at "
                        f"{index_text(flat, stored.shape)}"
                    )

    def _read_batch(self, stored: StoredTensor, lines: _Lines, item: int) -> npt.NDArray[np.uint8]:
        """The bytes of a few lines, u8 [lines, length * item], in the scratch."""
        nbytes, stride_bytes = lines.length * item, lines.stride * item
        offset = stored.offset + lines.first * item
        if lines.count == 1 or stride_bytes - nbytes < _PAGE_BYTES:
            span = (lines.count - 1) * stride_bytes + nbytes
            self._pread(stored.path, self._scratch[:span], offset)
            if lines.count == 1:
                return self._scratch[None, :nbytes]
            steps = (stride_bytes, 1)
            shape = (lines.count, nbytes)
            return np.lib.stride_tricks.as_strided(self._scratch, shape, steps)
        batch = self._scratch[: lines.count * nbytes].reshape(lines.count, nbytes)
        for index in range(lines.count):
            self._pread(stored.path, batch[index], offset + index * stride_bytes)
        return batch

    def _pread(self, path: str, target: npt.NDArray[np.uint8], offset: int) -> None:
        done = 0
        try:
            fd = self._fd(path)
            while done < target.size:
                count = os.preadv(fd, [target[done:].data], offset + done)
                if not count:
                    raise StorageError(
                        "the file has become shorter while it was read",
                        path=path, offset=offset, wanted_bytes=target.size, done_bytes=done,
                    )  # fmt: skip
                done += count
        except OSError as error:
            raise StorageError(describe_os_error(error), path=path, offset=offset) from error
        self.bytes_read += done

    def _fd(self, path: str) -> int:
        fd = self._open.pop(path, None)
        if fd is None:
            fd = open_plain(path)
            if len(self._open) >= _OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
        self._open[path] = fd
        return fd

    def _read_indexed(self, index: str) -> None:
        """The tensors of the files that the index names; what only the files name, too."""
        mapping = self._load_index(index)
        headers: dict[str, dict[str, StoredTensor]] = {}
        for file in dict.fromkeys(mapping.values()):
            if os.path.basename(file) != file or not file.endswith(".safetensors"):
                raise self._refuse(
                    f"its index names the file {file!r}: allowed are names of .safetensors files "
                    "in the same directory"
                )
            headers[file] = self._read_header(os.path.join(self.directory, file))
        for name, file in mapping.items():
            stored = headers[file].get(name)
            if stored is None:
                raise self._refuse(f"its index says that {name} is in {file}, where it is not")
            self.tensors[name] = stored
        for header in headers.values():
            for name, stored in header.items():
                self.tensors.setdefault(name, stored)

    def _load_index(self, index: str) -> Mapping[str, str]:
        try:
            mapping = parse_json(read_plain(index, _INDEX_BYTES_MAX))["weight_map"]
        except OSError as error:
            raise self._refuse(f"{index}: {describe_os_error(error)}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._refuse(f"{index} is no index of safetensors files ({error!r})") from None
        sound = isinstance(mapping, dict) and all(isinstance(x, str) for x in mapping.values())
        if not sound:
            raise self._refuse(f"{index}: weight_map is no mapping of names to files")
        return mapping

    def _read_header(self, path: str) -> dict[str, StoredTensor]:
        try:
            with os.fdopen(open_plain(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= _HEADER_BYTES_MAX or size < 8 + length:
                    raise self._refuse(
                        f"{path} has {size:,} bytes and its header claims to take {length:,}: it "
                        "is truncated, or no safetensors file"
                    )
                header = parse_json(file.read(length))
            tensors = _tensors_of(header, path, 8 + length)
            end = max((x[1] for x in tensors.values()), default=0)
            if end > size:
                raise self._refuse(
                    f"{path} has {size:,} bytes, but its header claims {end:,}: it is truncated"
                )
            # Opening checks what the format asks for besides: no holes, no overlaps.
            with safe_open(path, framework="numpy"):
                pass
        except OSError as error:
            raise self._refuse(f"{path}: {describe_os_error(error)}") from error
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._refuse(f"{path} is no safetensors file ({error})") from None
        return {name: stored for name, (stored, _) in tensors.items()}

    def _refuse(self, why: str) -> ConfigError:
        return _refusal(self.key, self.directory, why)


def refuse_unfinished(directory: str, key: str, stem: str = "model") -> None:
    """Raise ConfigError when `directory` holds an export that has not come to its end."""
    if os.path.lexists(os.path.join(directory, stem + MARKER_SUFFIX)):
        why = "it is an export that was interrupted (or goes on); export again"
        raise _refusal(key, directory, why)


def index_text(flat: int, shape: Sequence[int]) -> str:
    """`[2, 17]`: where element number `flat` of a tensor is."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return str(index)


def _refusal(key: str, directory: str, why: str) -> ConfigError:
    return ConfigError(f"{key} = {directory}: {why.rstrip('.')}.")


@dataclass(frozen=True)
class _Lines:
    """`count` runs of `length` elements, `stride` apart; `first` is the first one's start."""

    first: int
    count: int
    stride: int
    length: int


def _tensors_of(header: Any, path: str, data_at: int) -> dict[str, tuple[StoredTensor, int]]:
    """Name to tensor and where it ends; ValueError, KeyError or TypeError when it is unsound."""
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(x) is int and x >= 0 for x in (*shape, begin, end)) or end < begin:
            raise ValueError(f"{name} has a shape or place that is none")
        item = _ITEM_BYTES.get(dtype)
        if item is not None and prod(shape) * item != end - begin:
            raise ValueError(f"{name} has another length than its shape and dtype")
        tensors[name] = (StoredTensor(dtype, tuple(shape), path, data_at + begin), data_at + end)
    return tensors


def _convert(raw: npt.NDArray[np.uint8], dtype: str, target: F32) -> None:
    """Write the numbers whose bytes are `raw` [lines, bytes] to `target` [lines, elements]."""
    if dtype == "F32":
        target[...] = raw.view("<f4")
    elif dtype == "F16":
        target[...] = raw.view("<f2")
    else:
        wide = raw.view("<u2").astype("<u4")
        wide <<= 16
        target[...] = wide.view("<f4")
