"""`train.init_from`: masters from the weights of a directory, each rank reading its own parts only.

Checked as a whole before anything is allocated or discarded; then every piece of a tensor that a
rank stores is read by itself, so memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from moe.config import ModelConfig
from moe.params import EMBEDDING, HEAD
from moe.weights.names import Match, Place
from moe.weights.reading import F32, WeightFiles
from offload.blocks import TensorSpec
from ops.errors import ConfigError

KEY = "train.init_from"
_LIMITS = {
    "float32": np.inf,
    "bfloat16": float(np.uint32(0x7F7F8000).view(np.float32)),
    "float16": 65520.0,
}
"""The least magnitude that a dtype of weights rounds to infinity."""


class TensorSource:
    """Pieces of the tensors of a model, from files that have been matched with it."""

    def __init__(
        self,
        files: WeightFiles,
        places: Mapping[str, Place],
        weight_dtype: str = "float32",
        low: float = -np.inf,
    ) -> None:
        """Values that are infinite in `weight_dtype`, as far as tensors are stored in it, and those
        below `low`, are refused."""
        self._files = files
        self._places = places
        self._weight_dtype = weight_dtype
        self._low = low

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def values(self, tensor: TensorSpec) -> F32:
        """fp32 values of a tensor, a block of one, or a piece of such a block; flat.

        Raises ConfigError for values that are not finite or cannot be, StorageError when reading
        fails.
        """
        out = np.empty(tensor.size, np.float32)
        if not tensor.name:  # the padding of a share
            out[:] = 0
            return out
        block = tensor.piece_of or tensor
        width = block.size // block.shape[0]
        place, done = self._places[tensor.name], 0
        for rows, columns in rectangles(tensor.flat0, tensor.flat0 + tensor.size, width):
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            part = out[done : done + shape[0] * shape[1]].reshape(shape)
            rows = slice(block.row0 + rows.start, block.row0 + rows.stop)
            columns = slice(block.col0 + columns.start, block.col0 + columns.stop)
            self._files.read(place, rows, columns, part)
            done += part.size
        self._check(tensor, out)
        return out

    def _check(self, tensor: TensorSpec, values: F32) -> None:
        limit = np.inf if tensor.kept else _LIMITS[self._weight_dtype]
        if values.size and (values.min() < self._low or max(values.max(), -values.min()) >= limit):
            bad = int(((values < self._low) | (np.abs(values) >= limit)).argmax())
            block = tensor.piece_of or tensor
            row, column = divmod(tensor.flat0 + bad, block.size // block.shape[0])
            index = [block.row0 + row, block.col0 + column][: len(block.shape)]
            why = (
                f"infinite in train.weight_dtype = {self._weight_dtype}"
                if values[bad] >= self._low
                else "negative"
            )
            raise ConfigError(
                f"{self._files.key} = {self._files.directory}: {tensor.name} has at {index} the "
                f"value {values[bad]!s}, which is {why}."
            )


def rectangles(begin: int, end: int, width: int) -> Iterator[tuple[slice, slice]]:
    """The (rows, columns) that elements [begin, end) of rows of `width` cover, in order."""
    while begin < end:
        row, column = divmod(begin, width)
        if column or end - begin < width:
            stop = min(width, column + end - begin)
            yield slice(row, row + 1), slice(column, stop)
            begin += stop - column
        else:
            last = end // width
            yield slice(row, last), slice(0, width)
            begin = last * width


@contextmanager
def initial_weights(
    directory: str, model: ModelConfig, key: str = KEY, weight_dtype: str = "float32"
) -> Iterator[TensorSource]:
    """The weights in `directory`; every fault is told at once, in one ConfigError.

    `key` is the option or configuration key that named the directory. Values that would be infinite
    in `weight_dtype` are refused when they are read. May block: a head beside a tied embedding is
    compared with it.
    """
    with WeightFiles(directory, key) as files:
        match = Match(model, files.tensors)
        match.require(f"{key} = {directory}")
        if HEAD in files.tensors and model.tie_word_embeddings:
            if not files.equal(HEAD, EMBEDDING):
                match.unfit.append(
                    f"{HEAD} differs from {EMBEDDING}, although model.tie_word_embeddings is true"
                )
            match.require(f"{key} = {directory}")
        yield TensorSource(files, match.places, weight_dtype)


def check_initial_weights(directory: str, model: ModelConfig) -> None:
    """Raise ConfigError unless `directory` holds weights of this model; reads headers."""
    with initial_weights(directory, model):
        pass
