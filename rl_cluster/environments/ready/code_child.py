"""Second program of the process that code is run in: code and calls in (standard input), their values out.

It executes the code, evaluates the calls one by one and writes a line for each: the order's token, then JSON
[index, value or null, error], the value with its types (code_values reads it). The expected values are not
here, and a hook keeps the code from files outside its folder, other processes and the network. Handed to
Python as text, with nothing of this project beside it. Standard library only.
"""

import builtins
import gc
import json
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself would be imported for every program that is tested
    from collections.abc import Callable
    from typing import Any, BinaryIO

MAX_DEPTH = 50


READABLE = ("/dev/null", "/dev/urandom", "/proc/self/status")
STARTING = frozenset(
    [
        "os.fork",
        "os.forkpty",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "subprocess.Popen",
        "pty.spawn",
        "import:_posixsubprocess",
    ]
)
"""Events of starting processes."""
NEVER = frozenset(
    [
        "os.kill",
        "os.killpg",
        "signal.pthread_kill",
        "os.symlink",
        "os.link",
        "resource.setrlimit",
        "resource.prlimit",
        "gc.get_referrers",
        "gc.get_referents",
        "sqlite3.connect",
        "socket.connect",
        "socket.bind",
        "socket.sendto",
        "socket.sendmsg",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "ctypes.dlopen",
        "ctypes.dlsym",
        "import:ctypes",
        "import:_ctypes",
        "import:_xxsubinterpreters",
        "import:_interpreters",
        "import:_testcapi",
        "import:_testinternalcapi",
        "import:sqlite3",
        "import:_sqlite3",
        "import:_gdbm",
        "import:_dbm",
        "import:readline",
        "import:_posixshmem",
        "import:_multiprocessing",
    ]
)
HARMLESS = frozenset({"os.putenv", "os.unsetenv", "os.listdrives"})


def path_rule(home: str, libraries: tuple[str, ...]) -> "Callable[[object, bool, bool], bool]":
    """f(path, to_read, to_list) -> whether the code may: anything in its folder, reading in the standard
    library.

    By the text of the path alone, which is enough without links, and cannot be changed by patching os.path.
    """
    kind, text, raw, whole, no_one, look = type, str, bytes, int, any, os.stat
    foreign, files = ("site-packages", "dist-packages"), READABLE

    def is_folder(path: str) -> bool:
        """Open, it could be where relative paths start, and no event tells."""
        try:
            return look(path).st_mode & 0o170000 == 0o040000
        except OSError:
            return False

    def inside(path: "Any", to_read: bool, to_list: bool) -> bool:
        if kind(path) is raw:
            path = path.decode("utf-8", "surrogateescape")
        if kind(path) is not text:
            return path is None or kind(path) is whole
        parts = path.split("/")
        if ".." in parts:
            return False
        if path == home or path.startswith(home + "/"):
            return True
        if not path.startswith("/"):
            return True
        if not to_read or (is_folder(path) and not to_list) or no_one(name in parts for name in foreign):
            return False
        return path in files or no_one(path == root or path.startswith(root + "/") for root in libraries)

    return inside


def guard(home: str, libraries: tuple[str, ...], may_start_processes: bool) -> None:
    """Audit hooks cannot be removed. This one uses closure cells only, which the code has no way to."""
    kind, text, whole, refused, again = type, str, int, PermissionError, BlockingIOError
    starting, never, harmless, some = STARTING, NEVER, HARMLESS, any
    inside = path_rule(home, libraries)

    def hook(event: str, args: "tuple[Any, ...]") -> None:
        name, machine_code = event, ""
        if event == "import" and kind(args[0]) is text:
            # Of machine code only the last part of the name counts, whatever stands before it.
            name = "import:" + args[0].rpartition(".")[2]
            machine_code = args[1] if kind(args[1]) is text else ""
        if name in starting:
            if may_start_processes:
                return
            raise again(11, "Resource temporarily unavailable: no processes here")
        if name in never:
            raise refused(13, name + " is not allowed here")
        if machine_code and not some(machine_code.startswith(r + "/") for r in libraries):
            raise refused(13, "machine code of its own is not allowed here")
        if event == "open":
            writes = args[2] & 3 if kind(args[2]) is whole else args[1] != "r"
            paths, to_read = args[:1], not writes
        elif event.startswith("os.") and event not in harmless:
            paths, to_read = args[: 2 if event == "os.rename" else 1], event in ("os.listdir", "os.scandir")
        else:
            return
        for path in paths:
            if not inside(path, to_read, event != "open"):
                raise refused(13, event + " is not allowed there")

    if not may_start_processes:
        sys.modules["_posixsubprocess"] = without_processes()
    sys.addaudithook(hook)


def without_processes() -> types.ModuleType:
    """A stand-in, so that what only imports subprocess (asyncio) works; the real one raises no event."""

    def fork_exec(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable: no processes here")

    module = types.ModuleType("_posixsubprocess")
    vars(module)["fork_exec"] = fork_exec
    return module


def typed(value: "Any", depth: int = 0) -> "list[Any]":
    """A plain value as JSON that keeps its types; TypeError for anything else."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise TypeError("nested too deeply")
    if value is None:
        return ["N"]
    if kind in (bool, str):
        return [kind.__name__, value]
    if kind is int:
        return ["int", hex(value)]
    if kind in (float, complex):
        parts = (value,) if kind is float else (value.real, value.imag)
        if not all(part - part == 0.0 for part in parts):
            raise TypeError(f"{value}, which is not finite")
        return [kind.__name__, *[part.hex() for part in parts]]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (list, tuple, set):
        return [kind.__name__, [typed(item, depth + 1) for item in value]]
    if kind is dict:
        return ["dict", [[typed(k, depth + 1), typed(v, depth + 1)] for k, v in value.items()]]
    raise TypeError(f"of type {kind.__name__}")


def run(code: str, calls: tuple[str, ...], token: str, channel: "BinaryIO") -> None:
    """calls: a tuple. Nothing that decides what is evaluated can be changed from the code."""
    evaluate, build, encode, count = eval, compile, json.dumps, enumerate

    def report(index: int, value: "list[Any] | None", error: str) -> None:
        text = token + " " + encode([index, value, error[:500]], allow_nan=False) + "\n"
        channel.write(text.encode("utf-8", "replace"))
        channel.flush()

    answer = types.ModuleType("answer")
    names = answer.__dict__
    names["__builtins__"] = builtins
    try:
        exec(build(code, "answer.py", "exec"), names)
    except BaseException as error:  # noqa: BLE001 — the code may raise anything, SystemExit included
        report(-1, None, told(error))
        return
    report(-1, ["N"], "")
    for index, call in count(calls):
        try:
            value = evaluate(build(call, "test.py", "eval"), names)
        except BaseException as error:  # noqa: BLE001
            report(index, None, told(error))
            continue
        try:
            report(index, typed(value), "")
        except Exception as error:  # noqa: BLE001
            report(index, None, f"returned what is no plain value: {told(error)}")


def told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 — its own __str__ raises
        return type(error).__name__


def main() -> None:
    order = json.load(sys.stdin)
    channel = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    # The code's __main__ is an empty module, not this one.
    sys.modules["__main__"] = types.ModuleType("__main__")
    work = (order["code"], tuple(order["calls"]), order["token"], channel)
    guard(os.getcwd(), tuple(sys.path), order["processes"] > 0)
    del order
    gc.collect()
    gc.freeze()  # what is there now is not among gc.get_objects()
    run(*work)
    # Not through the interpreter's end, where the code's exit functions and finalizers run.
    os._exit(0)


if __name__ == "__main__":
    main()
