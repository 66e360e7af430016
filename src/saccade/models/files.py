"""Atomic writes of files, and a checksum inside safetensors files that detects any flipped bit.

A file is written under a temporary name in its folder, synced, and renamed. The first entry in the metadata of a sealed
safetensors file is the BLAKE2b digest of all of its bytes, in which the digest itself counts as zeros. Other programs
can read the file like any other safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# two marks, because a flipped bit can hide only one of them
SEAL, ALGORITHM = "saccade.digest", "blake2b"
DIGITS = 64
PREFIX = f'{{"__metadata__":{{"{SEAL}":"{ALGORITHM}:'.encode()
SEALED = re.compile(re.escape(PREFIX) + rb"([0-9a-f]{%d})\"" % DIGITS)
# safetensors' own limit for a header
LONGEST_HEADER = 100_000_000
PIECE = 1 << 20


def temporary(path: Path) -> Path:
    """The temporary name under which the next content of path is written."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Adds path to an OSError that names no file, such as those of write and fsync."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def check_readable(path: Path) -> None:
    """Raises ValueError for a name that is not UTF-8, because safetensors cannot open such a file."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path.absolute())
        raise ValueError(f"{name!r} is not UTF-8, and safetensors opens no such file; rename the folder") from None


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write data at path; at every moment, and after a crash, path has either the old or the new content.

    Raises an OSError that names path; no temporary file is then left.
    """
    write_together([(Path(path), data)])


def write_together(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write all files of one folder under temporary names, then rename them in order, with nothing in between.

    A crash between two renames leaves the earlier files new and the later ones old. Raises an OSError that names the
    file. Then no temporary file is left, and unless a rename failed, no file has changed.
    """
    written = list[Path]()
    try:
        for path, data in files:
            beside = temporary(path)
            # a killed run may have left this file, or it may be a link; "x" does not follow a link made after this
            beside.unlink(missing_ok=True)
            with naming(path), open(beside, "xb") as file:
                written.append(path)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path in written:
            os.replace(temporary(path), path)
    except BaseException:
        for path in written:
            temporary(path).unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in written}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a loss of power."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises OSError, and ValueError for a file that is not JSON or nests too deeply."""
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} nests its lists and objects too deeply; expected the JSON of a model") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Like `read_json`, but also raises ValueError if the file does not contain an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}; expected an object")
    return content


def seal(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file whose metadata is replaced by its digest and `metadata`; equal inputs give equal bytes."""
    length = int.from_bytes(data[:8], "little")
    tensors: dict[str, Any] = json.loads(data[8 : 8 + length])
    tensors.pop("__metadata__", None)
    sealed = {SEAL: f"{ALGORITHM}:{'0' * DIGITS}", **dict(sorted(metadata.items()))}
    header = json.dumps({"__metadata__": sealed, **tensors}, separators=(",", ":")).encode()
    # tensors start at a multiple of 8, as safetensors pads its headers
    header += b" " * (-len(header) % 8)
    head, body = len(header).to_bytes(8, "little") + header, memoryview(data)[8 + length :]
    digest = hashlib.blake2b(head, digest_size=DIGITS // 2)
    digest.update(body)
    at = 8 + len(PREFIX)
    return b"".join([head[:at], digest.hexdigest().encode(), head[at + DIGITS :], body])


def check_seal(path: Path, remedy: str, *, required: bool = False) -> None:
    """Raises ValueError if the bytes of a safetensors file contradict its digest; remedy: what to do then.

    A file without a digest, as other programs write it, passes unless `required`.
    """
    damaged = f"{path} is damaged: its bytes contradict its checksum; {remedy}"
    with naming(path), open(path, "rb") as file:
        size = file.read(8)
        header = file.read(min(int.from_bytes(size, "little"), LONGEST_HEADER))
        match = SEALED.match(header)
        if match is None:
            start = header[: len(PREFIX) + DIGITS]
            if SEAL.encode() in start or f'"{ALGORITHM}:'.encode() in start:
                raise ValueError(damaged)
            if required:
                raise ValueError(f"{path} is not a checkpoint of saccade train, or is damaged; {remedy}")
            return
        digest = hashlib.blake2b(size, digest_size=DIGITS // 2)
        digest.update(header[: match.start(1)] + b"0" * DIGITS + header[match.end(1) :])
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest().encode() != match[1]:
        raise ValueError(damaged)
