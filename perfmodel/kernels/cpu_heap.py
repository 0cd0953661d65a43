"""glibc's heap while a training step allocates and frees: which bytes of a new block lie in pages that fault.

A block comes from the smallest free chunk that holds it, else from the top of the heap, which grows. A freed block joins
its free neighbours; where that reaches the top and the top is larger than the trim threshold, the top's pages go back to
the system, and the next growth pays for them again (malloc.c of glibc 2.31 to 2.41: `_int_malloc`, `_int_free`,
`systrim`). A block as large as the mmap threshold is a map of its own, and all its pages are new; freed, it raises the
threshold to its size, up to 32 MiB, and the trim threshold to twice that (mallopt(3)). So the first steps differ from
those that follow, and what they leave on top of the heap (states of the optimizer) keeps pages from being given back.

Left out: blocks below SMALL_BYTES, which have lists of their own, and what Python keeps on the heap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping

from perfmodel.units import KIBI, MEBI

MAP_BYTES = 32 * MEBI  # DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems
LEAST_MAP_BYTES = 128 * KIBI  # DEFAULT_MMAP_THRESHOLD
TOP_PAD_BYTES = 128 * KIBI  # DEFAULT_TOP_PAD: what a trim leaves, and what a growth adds
TRIM_CHECK_BYTES = 64 * KIBI  # FASTBIN_CONSOLIDATION_THRESHOLD: smaller frees do not look at the top
SMALL_BYTES = 1 * KIBI  # blocks up to 1032 bytes stay in the thread's cache
ALIGN_BYTES = 64  # PyTorch asks posix_memalign for multiples of a cache line
HEADER_BYTES = 16
PAGE_BYTES = 4 * KIBI


# Variables that glibc reads when a process starts (mallopt(3)).
NO_MAPS, TRIM_FROM = "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"
NEVER_TRIMMED_BYTES = 1024**4  # a threshold that no heap reaches
MAPPED = -1  # address of a block with a map of its own


def keeps_pages(env: Mapping[str, str]) -> bool:
    """Whether processes with these variables keep every page they were given: no maps, no trimming.

    A step that repeats then meets no new pages. PyTorch's tuning guide recommends allocators that behave so.
    """
    trim = env.get(TRIM_FROM, "")
    return env.get(NO_MAPS) == "0" and trim.isdigit() and int(trim) >= NEVER_TRIMMED_BYTES


class Heap:
    """Addresses of blocks in the order in which a program allocates and frees them."""

    def __init__(self) -> None:
        self.map_bytes = LEAST_MAP_BYTES
        self.trim_bytes = LEAST_MAP_BYTES  # DEFAULT_TRIM_THRESHOLD is the same
        self.top = 0  # first address behind the last block
        self.resident = 0  # pages below this address have been touched and were not given back
        self.by_size: list[tuple[int, int]] = []  # free chunks: (size, start)
        self.ends: dict[int, int] = {}  # end of a free chunk -> its start
        self.starts: dict[int, int] = {}  # start of a free chunk -> its end

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """A block's address and how many of its bytes lie in new pages."""
        size = chunk_bytes(n_bytes)
        if size >= self.map_bytes and not self._fits(size):
            return MAPPED, n_bytes
        place = bisect_left(self.by_size, (size, -1))
        if place < len(self.by_size):
            found, start = self.by_size[place]
            self._take(start, start + found)
            if found > size:
                self._keep(start + size, start + found)
            return start, 0
        start, self.top = self.top, self.top + size
        fresh = max(self.top - max(self.resident, start), 0)
        self.resident = max(self.resident, self.top)
        return start, fresh

    def free(self, start: int, n_bytes: int) -> int:
        """Gives a block back; returns the bytes whose pages go back to the system."""
        size = chunk_bytes(n_bytes)
        if start == MAPPED:
            mapped = -(-(size + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES
            if self.map_bytes < mapped <= MAP_BYTES:
                self.map_bytes, self.trim_bytes = mapped, 2 * mapped
            return n_bytes
        end = start + size
        if start in self.ends:
            before = self.ends[start]
            self._take(before, start)
            start = before
        if end in self.starts:
            after = self.starts[end]
            self._take(end, after)
            end = after
        if end < self.top:
            self._keep(start, end)
            return 0
        joined = self.top - start
        self.top = start
        free_top = self.resident - self.top
        if joined < TRIM_CHECK_BYTES or free_top < self.trim_bytes:
            return 0
        given = free_top - TOP_PAD_BYTES
        self.resident = self.top + TOP_PAD_BYTES
        return given

    def _fits(self, size: int) -> bool:
        """True if a free chunk or the top's pages hold the block: maps are made only where the heap would grow."""
        return bool(self.by_size and self.by_size[-1][0] >= size) or self.resident - self.top >= size

    def _keep(self, start: int, end: int) -> None:
        insort(self.by_size, (end - start, start))
        self.starts[start], self.ends[end] = end, start

    def _take(self, start: int, end: int) -> None:
        del self.by_size[bisect_left(self.by_size, (end - start, start))]
        del self.starts[start], self.ends[end]


def chunk_bytes(n_bytes: int) -> int:
    """Bytes of the heap that a request takes: its header, and whole cache lines."""
    return -(-(n_bytes + HEADER_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
