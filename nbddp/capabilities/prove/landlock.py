"""Linux's Landlock: a process that can write no file, whatever its libraries do. Nothing where a kernel has none."""

from __future__ import annotations

import ctypes
import os
import struct

CREATE, ADD_RULE, RESTRICT = 444, 445, 446  # system calls, the same on all processors
VERSION = 1  # a flag of CREATE: only tell the version
PATH_BENEATH = 1
NO_NEW_PRIVILEGES = 38  # of prctl
WRITE_FILE = 1 << 1
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
REFER, TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3


def deny_writes(except_below: str) -> bool:
    """Deny this process and its children to open a file for writing, and to make, remove or truncate any, but below
    one folder. Whether it is denied. What is open stays."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE, None, ctypes.c_size_t(0), VERSION)
    if version < 1:
        return False
    handled = WRITE_FILE | REMOVE_AND_MAKE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    asked = struct.pack("=Q", handled)
    rules = libc.syscall(CREATE, asked, ctypes.c_size_t(len(asked)), 0)
    if rules < 0:
        return False
    folder = os.open(except_below, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", handled, folder)
        added = libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, 0)
        return bool(
            added == 0 and libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(RESTRICT, rules, 0) == 0
        )
    finally:
        os.close(folder)
        os.close(rules)
