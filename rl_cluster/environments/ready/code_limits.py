"""First program of the process that code is run in: limits and a second program in, as arguments; runs that.

The limits, and that no privileges can be gained, are kept over exec. What was imported for them (ctypes) is
not, so the code cannot use it. Handed to Python as text: no path of it is known there. Standard library only.
"""

import ctypes
import json
import os
import resource
import sys

PR_SET_NO_NEW_PRIVS = 38


def limit_self(limits: dict[str, int]) -> None:
    """No new privileges, no core files, and the limits that were asked for: soft and hard, for good."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_NO_NEW_PRIVS) failed")
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
    }
    for kind, limit in wanted.items():
        highest = resource.getrlimit(kind)[1]  # may only be lowered; the machine's own may be stricter
        value = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
        resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    limit_self(json.loads(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", "-c", sys.argv[2]])
