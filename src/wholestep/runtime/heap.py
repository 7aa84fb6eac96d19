"""Keep the memory that a step has freed for the next one, instead of giving it back to the system in between.

A step on the CPU frees nearly all it has used when it ends. glibc then returns the top of its heap to the system, and
the next step gets it back page by page, each cleared and mapped anew: up to a seventh of a step's time. (Where eager
does better, it is by luck: gradients that wait for `zero_grad` lie above the rest.) GPUs have no such trouble: torch
keeps their memory in any case.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform

logger = logging.getLogger(__name__)

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_NEVER = -1
# The most that glibc allows; what is larger goes back to the system at once, as it does by default.
_LARGEST_BYTES = 32 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, from now on and in the whole process; False if it is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    logger.info("memory that is freed stays with the process: %s", "yes" if done else "glibc refused")
    return done
