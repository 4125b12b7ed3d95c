"""How soon a thread that wants the interpreter gets it from one that computes in Python.

CPython asks the holder of the interpreter lock to hand it over after 5 ms. A thread that has just
finished a transfer needs it for microseconds, and its drive idles meanwhile: 5 ms are 25 MB at
5 GB/s. So it is asked after 0.5 ms while anybody who keeps a device busy wants that.

The setting is the process's: the value found is put back when the last who wanted it lets go.
Any thread may call.
"""

from __future__ import annotations

import sys
import threading

SWITCH_INTERVAL_S = 0.0005

_lock = threading.Lock()
_num_holders = 0
_found_s = 0.0


def shorten_switch_interval() -> None:
    """Lower the interval (a shorter one stays) until the matching `restore_switch_interval`."""
    global _num_holders, _found_s
    with _lock:
        if _num_holders == 0:
            _found_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_found_s, SWITCH_INTERVAL_S))
        _num_holders += 1


def restore_switch_interval() -> None:
    """Undo one `shorten_switch_interval`; the last one puts back what was found."""
    global _num_holders
    with _lock:
        assert _num_holders > 0
        _num_holders -= 1
        if _num_holders == 0:
            sys.setswitchinterval(_found_s)
