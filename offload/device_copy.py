"""The device copy of a unit's weights: how host bytes become tensors a stage can take.

On CPU the device's memory is an arena of its own; uploading expands bfloat16 to the compute dtype,
because MindSpore's CPU matmul has no bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.arena import Buffer
from offload.blocks import Field, UnitLayout
from ops.device import Backend
from ops.dtypes import storage_dtype
from ops.kernels.pool import KernelPool
from ops.kernels.split import expand_bf16


def field_view(buffer: Buffer, item: Field) -> np.ndarray:
    """The flat array of a field inside a block's buffer."""
    dtype = "int16" if item.dtype == "int16" else storage_dtype(item.dtype).str
    return buffer.view(dtype, item.offset, item.count)


def upload(layout: UnitLayout, source: Buffer, target: Buffer, pool: KernelPool) -> None:
    """Fill the device buffer `target` from the unit's weight block in `source`."""
    for stored, placed in zip(layout.fields["weight"], layout.device_fields):
        if not stored.count:
            continue
        from_array, to_array = field_view(source, stored), field_view(target, placed)
        if stored.dtype == "bfloat16":
            expand_bf16(from_array, to_array, pool=pool)
        else:
            np.copyto(to_array, from_array)


def device_tensors(layout: UnitLayout, buffer: Buffer, backend: Backend) -> dict[str, Any]:
    """Backend tensors over the device buffer, by tensor name, without a copy."""
    split, kept = (field_view(buffer, item) for item in layout.device_fields)
    tensors = {}
    for place in layout.places:
        flat, start = (kept, place.start - layout.num_split) if place.kept else (split, place.start)
        array = flat[start : start + place.spec.size].reshape(place.spec.shape)
        tensors[place.spec.name] = backend.wrap(array)
    return tensors
