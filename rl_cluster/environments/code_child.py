"""Run by code_runner in a process of its own: code and calls in (JSON on standard input), their values out.

Limits itself, executes the code, evaluates the calls one by one and appends [index, repr or null, error] as a
line of JSON to the results file. Uses the standard library only, and nothing of this project.
"""

import builtins
import ctypes
import json
import resource
import sys

PR_SET_NO_NEW_PRIVS = 38


def limit_self(limits: dict) -> None:
    """No new privileges, no core files, and the limits that were asked for: soft and hard, for good."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_NO_NEW_PRIVS) failed")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], limits["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"], limits["open_files"]))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))


def main() -> None:
    order = json.load(sys.stdin)
    results = open(order["results"], "w", encoding="utf-8")

    def report(index: int, value: str | None, error: str) -> None:
        results.write(json.dumps([index, value, error[:500]]) + "\n")
        results.flush()

    limit_self(order["limits"])
    names = {"__name__": "answer", "__builtins__": builtins}
    try:
        exec(compile(order["code"], "answer.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 — the code may raise anything, SystemExit included
        report(-1, None, f"{type(error).__name__}: {error}")
        return
    report(-1, "None", "")
    for index, call in enumerate(order["calls"]):
        try:
            report(index, repr(eval(compile(call, "test.py", "eval"), names)), "")
        except BaseException as error:  # noqa: BLE001
            report(index, None, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
