"""What Linux offers and a portable build of Python leaves out.

Interpreters that are made to run anywhere (those that uv installs) are built against the C library of 2012: they have
no `os.memfd_create`, no `os.pidfd_open` and no seals in `fcntl`. The kernel has them all the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1, 2, 4, 8  # linux/fcntl.h
_ADD_SEALS = 1033
_CLOSED_ON_EXEC, _SEALABLE = 1, 2  # linux/memfd.h
_PIDFD_OPEN = 434  # of x86-64 and ARM alike
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def memory_file(name: str) -> int:
    """The descriptor of a new file without a place, which may be sealed. Raises OSError."""
    return _checked(_LIBRARY.memfd_create(name.encode(), _CLOSED_ON_EXEC | _SEALABLE))


def seal(descriptor: int, seals: int) -> None:
    """Nobody can do that to the memory file any more. Raises OSError."""
    fcntl.fcntl(descriptor, _ADD_SEALS, seals)


def process_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises OSError."""
    return _checked(_LIBRARY.syscall(_PIDFD_OPEN, pid, 0))


def _checked(found: int) -> int:
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
