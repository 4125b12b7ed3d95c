"""Locks memory so that the system never swaps it out, without taking what is not touched.

`mlock2` with MLOCK_ONFAULT locks each page when it is first used; plain `mlock` would fill the
whole range at once, which an arena mapped without reservation cannot afford. The kernel counts the
range, not the pages, against the limit of the process (`ulimit -l`), unless it has CAP_IPC_LOCK.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource

from ops.units import format_bytes

_MLOCK_ONFAULT = 1


def lock_on_fault(address: int, nbytes: int) -> str | None:
    """Lock `nbytes` bytes at `address` as they are touched; returns why not, None when done.

    The lock ends with the mapping. Never raises, does not block.
    """
    try:
        mlock2 = ctypes.CDLL(None, use_errno=True).mlock2
    except AttributeError:  # glibc before 2.27, other C libraries
        return "the C library has no mlock2"
    if mlock2(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MLOCK_ONFAULT) == 0:
        return None
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if 0 <= limit < nbytes:
            return (
                f"the limit of locked memory is {format_bytes(limit)}; raise it with `ulimit -l "
                f"{-(-nbytes // 1024)}` or memlock in /etc/security/limits.conf"
            )
    return f"mlock2: {os.strerror(code)}"
