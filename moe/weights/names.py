"""Which tensors a checkpoint with canonical names must have, and where each lies in them. Pure.

Names are those of Qwen3-MoE (`moe/params.py`), one tensor per expert and projection. Published
checkpoints may pack the experts of a layer into two tensors:

    model.layers.N.mlp.experts.gate_up_proj   [experts, in, 2 x width] or [experts, 2 x width, in]
    model.layers.N.mlp.experts.down_proj      [experts, width, out]    or [experts, out, width]

The first form (`in-out`) multiplies rows from the left, the second one (`out-in`) is transposed.
Both tensors of a layer have one form. It is told by their shapes; one of the two may be square,
never both, because 2 x width and width cannot both be the hidden size.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from moe.config import ModelConfig
from moe.params import EMBEDDING, HEAD, build_units, size_of
from ops.errors import ConfigError

Shape = tuple[int, ...]
IN_OUT, OUT_IN = "in-out", "out-in"
PACKED_FORMS = (IN_OUT, OUT_IN)
DTYPES = ("F32", "BF16", "F16")
"""What safetensors calls the dtypes that weights may be read from."""

IGNORED = ("*rotary_emb.inv_freq",)
"""Patterns of tensors that old checkpoints carry although they follow from the configuration."""

LISTED_MAX = 10
UNITS_MAX = 1 << 18
_FEW = 1 << 14


@dataclass(frozen=True)
class Stored:
    """What a file says of a tensor: its dtype in the words of safetensors, and its shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Place:
    """Where the matrix of a canonical tensor lies in a stored one: element (r, c) is element
    `first + r * row_stride + c * col_stride` of `tensor`. A vector is a matrix of one column."""

    tensor: str
    first: int
    row_stride: int
    col_stride: int


def model_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name to shape of every tensor of the model, in forward order; a tied embedding once."""
    shapes: dict[str, Shape] = {}
    for unit in build_units(model):
        for spec in unit.tensors:
            rows = spec.row0 + spec.shape[0]
            shapes[spec.name] = (rows, *spec.shape[1:])
    return shapes


def require_size(model: ModelConfig, found: Mapping[str, Stored], what: str) -> None:
    """Raise ConfigError for a model that these tensors cannot be, before its tensors are listed.

    Listing takes time and memory for every unit and tensor. Where there are few, `Match` says
    better what is wrong; many have to be in the files. `what` begins the sentence.
    """
    size = size_of(model)
    if size.units > UNITS_MAX:
        raise ConfigError(
            f"{what} is said to hold a model of {size.units:,} units (experts, layers and slices "
            f"of the vocabulary); this version imports at most {UNITS_MAX:,}."
        )
    if size.units + size.tensors <= _FEW:
        return
    numbers = sum(prod(stored.shape) for stored in found.values())
    if len(found) < size.packed or numbers < size.numbers:
        raise ConfigError(
            f"{what} is said to hold a model of {size.tensors:,} tensors and {size.numbers:,} "
            f"numbers, and holds {len(found):,} and {numbers:,}."
        )


def packed_names(layer: int) -> tuple[str, str]:
    """The two packed tensors of a layer's experts: gate and up, down."""
    prefix = f"model.layers.{layer}.mlp.experts"
    return f"{prefix}.gate_up_proj", f"{prefix}.down_proj"


def packed_shapes(model: ModelConfig, form: str) -> tuple[Shape, Shape]:
    """Shapes of the two packed tensors in one of `PACKED_FORMS`."""
    experts, hidden, width = model.num_experts, model.hidden_size, model.moe_intermediate_size
    if form == IN_OUT:
        return (experts, hidden, 2 * width), (experts, width, hidden)
    return (experts, 2 * width, hidden), (experts, hidden, width)


def packed_places(model: ModelConfig, layer: int, form: str) -> dict[str, Place]:
    """Where every expert tensor of a layer lies in the packed ones."""
    gate_up, down = packed_names(layer)
    hidden, width = model.hidden_size, model.moe_intermediate_size
    places = {}
    for expert in range(model.num_experts):
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        both, single = expert * 2 * width * hidden, expert * width * hidden
        if form == IN_OUT:
            places[f"{prefix}.gate_proj.weight"] = Place(gate_up, both, 1, 2 * width)
            places[f"{prefix}.up_proj.weight"] = Place(gate_up, both + width, 1, 2 * width)
            places[f"{prefix}.down_proj.weight"] = Place(down, single, 1, hidden)
        else:
            up = both + width * hidden
            places[f"{prefix}.gate_proj.weight"] = Place(gate_up, both, hidden, 1)
            places[f"{prefix}.up_proj.weight"] = Place(gate_up, up, hidden, 1)
            places[f"{prefix}.down_proj.weight"] = Place(down, single, width, 1)
    return places


class Match:
    """The tensors `wanted` (of `model`) among those that `found` files hold.

    `places` says where each lies; `missing`, `extra` and `unfit` are sentences about what is wrong.
    """

    def __init__(
        self,
        model: ModelConfig,
        found: Mapping[str, Stored],
        wanted: Mapping[str, Shape] | None = None,
    ) -> None:
        """`wanted` (default: all of the model) are canonical names and their shapes."""
        self._found = found
        self._wanted = model_shapes(model) if wanted is None else wanted
        self.places: dict[str, Place] = {}
        self.missing: list[str] = []
        self.unfit: list[str] = []
        self._used: set[str] = set()
        packed: set[str] = set()
        for layer in range(model.num_hidden_layers):
            packed |= self._match_packed(model, layer)
        for name, shape in self._wanted.items():
            if name in packed:
                continue
            if self._fits(name, (shape,)):
                columns = prod(shape[1:])
                self.places[name] = Place(name, 0, columns, 1)
        if model.tie_word_embeddings and HEAD in found and HEAD not in self._wanted:
            self._fits(HEAD, (self._wanted.get(EMBEDDING, ()),))
        self.extra = [
            name
            for name in found
            if name not in self._used and not any(fnmatch.fnmatch(name, x) for x in IGNORED)
        ]

    def _match_packed(self, model: ModelConfig, layer: int) -> set[str]:
        """Match a layer's packed experts, if there are any; the names that they stand for."""
        names = packed_names(layer)
        there = [name in self._found for name in names]
        if not any(there):
            return set()
        forms = [
            form
            for form in PACKED_FORMS
            if all(
                self._found[name].shape == shape
                for name, shape, is_there in zip(names, packed_shapes(model, form), there)
                if is_there
            )
        ]
        choices = [packed_shapes(model, form) for form in forms or PACKED_FORMS]
        sound = [self._fits(name, shapes) for name, shapes in zip(names, zip(*choices))]
        places = packed_places(model, layer, forms[0] if forms else OUT_IN)
        if all(sound) and not forms:  # each has a possible shape, but of different forms
            self.unfit.append(f"{names[0]} and {names[1]} are not transposed alike")
        elif all(sound):
            self.places |= {name: at for name, at in places.items() if name in self._wanted}
        return set(places)

    def _fits(self, name: str, shapes: Sequence[Shape]) -> bool:
        """Whether `name` is there with one of these shapes; else it is noted."""
        self._used.add(name)
        stored = self._found.get(name)
        needed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        if stored is None:
            self.missing.append(f"{name} {needed}")
            return False
        if stored.shape not in shapes:
            self.unfit.append(f"{name} has {list(stored.shape)}, the model needs {needed}")
            return False
        if stored.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            self.unfit.append(f"{name} is of dtype {stored.dtype}, allowed are {known}")
            return False
        return True

    def require(self, what: str, *, extra: bool = True) -> None:
        """Raise ConfigError that lists everything that is wrong, if anything is.

        `what` begins the sentence; without `extra`, further tensors do not matter.
        """
        parts = [
            _listed("missing", self.missing),
            _listed("extra", self.extra if extra else []),
            _listed("unfit", self.unfit),
        ]
        wrong = [part for part in parts if part]
        if wrong:
            raise ConfigError(f"{what} does not hold this model: {'; '.join(wrong)}.")


def _listed(kind: str, names: Sequence[str]) -> str:
    """`3 missing: a, b, c`, cut after `LISTED_MAX`."""
    if not names:
        return ""
    more = len(names) - LISTED_MAX
    rest = f" and {more:,} more" if more > 0 else ""
    return f"{len(names):,} {kind}: {', '.join(names[:LISTED_MAX])}{rest}"
