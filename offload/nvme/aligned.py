"""Direct I/O: what the file system demands, whether it works, and aligned memory.

The alignment comes from the file system: `statx` with STATX_DIOALIGN where the kernel has it (Linux
6.1), else the block size of `stat`; it is never below 4096, because direct writes below the file
system's block size serialise on an inode lock even where the drive would accept 512.

Invariants: direct or buffered is chosen once per store, by really writing and reading one unit, and
logged with its reason. This module does not know blocks or stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ops.checksum import CHUNK_BYTES

log = logging.getLogger(__name__)

ALIGNMENT_BYTES_MIN = 4096
HUGE_PAGE_BYTES = 2 << 20
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_STATX_DIO_FIELDS_AT = 0x98  # stx_dio_mem_align, stx_dio_offset_align: two u32


@dataclass(frozen=True)
class AccessMode:
    """How a store reaches its data file.

    `alignment_bytes`: every extent starts at a multiple of it; with `direct`, every file offset,
    length and memory address of a transfer is one too. `reason` says why, for the log.
    """

    direct: bool
    alignment_bytes: int
    reason: str

    @property
    def io_alignment_bytes(self) -> int:
        """What offsets, lengths and addresses of a transfer must be multiples of."""
        return self.alignment_bytes if self.direct else 1


@dataclass(frozen=True)
class DioAlignment:
    """What `statx` says about direct I/O on a file: bytes, 0 where it is not supported."""

    memory_bytes: int
    offset_bytes: int


def statx_dio_alignment(path: str) -> DioAlignment | None:
    """The kernel's demands for direct I/O on the file `path`; None where it does not tell."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, ctypes.c_uint(_STATX_DIOALIGN), buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer.raw, 0)
    if not mask & _STATX_DIOALIGN:
        return None
    return DioAlignment(*struct.unpack_from("=II", buffer.raw, _STATX_DIO_FIELDS_AT))


def choose_access(
    directory: str,
    *,
    open_fd: Callable[[str, int], int] = os.open,
    statx: Callable[[str], DioAlignment | None] = statx_dio_alignment,
) -> AccessMode:
    """Try direct I/O on a probe file in `directory` (removed again) and log the choice.

    Blocks for one small write and read. Raises OSError when not even the probe file can be made.
    `open_fd` and `statx` are there for tests.
    """
    probe_fd, path = tempfile.mkstemp(prefix=".probe-", dir=directory)
    os.close(probe_fd)
    try:
        access = _probe(path, open_fd, statx)
    finally:
        os.unlink(path)
    level = logging.INFO if access.direct else logging.WARNING
    log.log(
        level,
        "%s: %s I/O, alignment %d bytes: %s",
        directory,
        "direct" if access.direct else "buffered",
        access.alignment_bytes,
        access.reason,
    )
    return access


def _probe(
    path: str,
    open_fd: Callable[[str, int], int],
    statx: Callable[[str], DioAlignment | None],
) -> AccessMode:
    reported = statx(path)
    if reported is None:
        alignment_bytes = _usable_alignment(os.stat(path).st_blksize)
        source = "block size of stat"
    else:
        alignment_bytes = _usable_alignment(max(reported.memory_bytes, reported.offset_bytes))
        source = f"statx reports memory {reported.memory_bytes}, offset {reported.offset_bytes}"
        if reported.offset_bytes == 0:
            return AccessMode(False, alignment_bytes, "statx reports no direct I/O on this file")
    try:
        fd = open_fd(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return AccessMode(False, alignment_bytes, f"open with O_DIRECT refused: {_name(error)}")
    try:
        unit = aligned_buffer(alignment_bytes, alignment_bytes).data
        os.pwritev(fd, [unit], 0)
        os.preadv(fd, [unit], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise OSError(error.errno, error.strerror, path) from None  # transfers name no file
        return AccessMode(False, alignment_bytes, f"O_DIRECT transfer refused: {_name(error)}")
    finally:
        os.close(fd)
    return AccessMode(True, alignment_bytes, source)


def _usable_alignment(nbytes: int) -> int:
    """`nbytes` as a power of two between the minimum and one checksum chunk."""
    power = 1 << max(nbytes - 1, 0).bit_length()
    return min(max(power, ALIGNMENT_BYTES_MIN), CHUNK_BYTES)


def _name(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror})"


def aligned_buffer(nbytes: int, alignment_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory, uint8 [nbytes], whose address is a multiple of `alignment_bytes`.

    Asks for huge pages where they matter: the drive moves memory in physically contiguous pieces,
    and pages of 4 KiB may cost a third of its bandwidth. Where there are none, it is plain memory.
    """
    if nbytes < HUGE_PAGE_BYTES:
        raw = np.zeros(nbytes + alignment_bytes, np.uint8)
    else:
        alignment_bytes = max(alignment_bytes, HUGE_PAGE_BYTES)
        # Private: shared anonymous memory, the default of mmap, gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, nbytes + alignment_bytes, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(memory, np.uint8)
    skip = -raw.ctypes.data % alignment_bytes
    return raw[skip : skip + nbytes]


def address_of(data: memoryview) -> int:
    """The memory address of the first byte of `data` (contiguous bytes); 0 when it is empty."""
    if data.nbytes == 0:
        return 0
    if data.readonly:
        return int(np.frombuffer(data, np.uint8).ctypes.data)
    # Eight times as fast; this is called for every transfer.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def bytes_of(buffer: Any, nbytes: int | None) -> tuple[memoryview, int]:
    """`buffer` as contiguous bytes, and how many of them count: `nbytes`, by default all.

    Raises ValueError for a buffer that is not contiguous or shorter than that.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    data = view.cast("B") if view.nbytes else memoryview(bytearray())
    length_bytes = data.nbytes if nbytes is None else nbytes
    if not 0 <= length_bytes <= data.nbytes:
        raise ValueError(f"{length_bytes} bytes of a buffer of {data.nbytes}")
    return data, length_bytes
