"""Blank the CUDA code of a shared library that one architecture never runs, so that it
packs well.

    python scripts/gpu/fatbin.py LIBRARY OUT 90          # keep machine code of sm_90
    python scripts/gpu/fatbin.py LIBRARY OUT 90 --ptx    # and PTX where a container has no code of sm_90

Blanked entries stay in place, full of zeros: sizes and addresses do not change. A
kernel whose entries are all blanked cannot run.
"""

from __future__ import annotations

import argparse
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"\x50\xed\x55\xba"
"""Start of a container of CUDA code."""
CONTAINER_HEAD = 16
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """Code at [start, end) of the library, of kind PTX or MACHINE_CODE."""

    start: int
    end: int
    kind: int
    arch: int


def containers(data: mmap.mmap) -> Iterator[list[Entry]]:
    """Yield the entries of each container."""
    at = data.find(MAGIC)
    while at >= 0:
        _, _, head, size = struct.unpack_from("<IHHQ", data, at)
        end = at + head + size
        if head != CONTAINER_HEAD or end > len(data):
            # other bytes that look like a container
            at = data.find(MAGIC, at + len(MAGIC))
            continue
        entries = []
        place = at + head
        while place < end:
            kind, _, entry_head = struct.unpack_from("<HHI", data, place)
            (entry_size,) = struct.unpack_from("<Q", data, place + 8)
            (arch,) = struct.unpack_from("<I", data, place + 28)
            start = place + entry_head
            place = start + entry_size
            entries.append(Entry(start, place, kind, arch))
        yield entries
        at = data.find(MAGIC, end)


def choose(entries: list[Entry], arch: int, *, keep_ptx: bool) -> set[Entry]:
    """Return the entries that a device of this architecture needs."""
    code = {
        entry for entry in entries if entry.kind == MACHINE_CODE and entry.arch == arch
    }
    ptx = [entry for entry in entries if entry.kind == PTX and entry.arch <= arch]
    if code or not ptx or not keep_ptx:
        return code
    return {max(ptx, key=lambda entry: entry.arch)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("arch", type=int)
    parser.add_argument("--ptx", action="store_true")
    options = parser.parse_args()
    kept = 0
    with options.library.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entries in containers(data):
        needed = choose(entries, options.arch, keep_ptx=options.ptx)
        kept += sum(entry.end - entry.start for entry in needed)
        for entry in entries:
            if entry not in needed:
                data[entry.start : entry.end] = bytes(entry.end - entry.start)
    options.out.write_bytes(data)
    print(
        f"{options.library.name}: kept {kept / 1e6:.1f} MB of code for sm_{options.arch}"
    )


if __name__ == "__main__":
    main()
