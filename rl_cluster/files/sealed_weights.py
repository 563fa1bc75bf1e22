"""A model's folder in, the SHA-256 of its weights into its marker; and later, which of them have changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from rl_cluster.files.own_folders import MARKER, files_in, read_marker

SEALED = ("*.safetensors", "reward_model.json")
"""What nobody edits by hand, and where one bit makes another model."""
DIGESTS = "sha256"
HASHING_THREADS = 4
"""hashlib gives the interpreter's lock away; more would only wait for the disk."""


def seal_weights(folder: Path, names: Sequence[str] | None = None) -> None:
    """Note the digests of a marked folder's weights. names: those that are new; None: all. Raises OSError."""
    marker = read_marker(folder)
    chosen = [name for name in names or files_in(folder) if any(fnmatch(name, one) for one in SEALED)]
    if marker is None or not chosen:
        return
    known = marker.get(DIGESTS)
    digests = (known if isinstance(known, dict) else {}) | _digests(folder, chosen)
    content = {**marker, DIGESTS: digests}
    (folder / MARKER).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def changed_weights(folder: Path) -> list[str]:
    """Those of them that are there and not as they were written. [] for folders of others. Raises OSError."""
    noted = (read_marker(folder) or {}).get(DIGESTS)
    if not isinstance(noted, dict):
        return []
    there = [name for name in sorted(noted) if (folder / name).is_file()]
    return [name for name, digest in _digests(folder, there).items() if digest != noted[name]]


def spoilt_words(folder: Path, names: Sequence[str]) -> str:
    """For messages."""
    return (
        f"{names[0]} has changed since it was written (its SHA-256 is another): it was damaged, or replaced. "
        f"Bring it back from a copy; if you have replaced it, delete {folder / MARKER}"
    )


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
