"""Which memory is alive when: every storage a step touches, numbered, with the op that made it and the op it died after."""

from __future__ import annotations

import weakref
from typing import Literal

import torch

from perfmodel.extract._torch import storage_key
from perfmodel.graph import Storage

Kind = Literal["parameter", "buffer", "input", "gradient", "optimizer_state", "activation"]


class StorageLog:
    """Numbers storages in order of appearance and notes when each is freed.

    A storage is followed by a weak reference to its object: torch keeps that object as long as the memory lives, also
    while only autograd or another tensor holds it. So a death is noticed at the moment the reference count says so,
    as in a real step.
    """

    def __init__(self) -> None:
        self.n_ops = 0
        self._born: list[int] = []
        self._dies: list[int | None] = []
        self._bytes: list[int] = []
        self._kinds: list[Kind] = []
        self._alive: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._closed = False

    def number(self, tensor: torch.Tensor, *, kind: Kind = "activation", born: int | None = None) -> int:
        """The id of the tensor's storage; a new storage is born after op `born` (default: the op that runs now)."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._alive.get(key)
        if known is not None:
            self._bytes[known] = max(self._bytes[known], storage.nbytes())
            return known
        number = len(self._born)
        self._born.append(self.n_ops if born is None else born)
        self._dies.append(None)
        self._bytes.append(storage.nbytes())
        self._kinds.append(kind)
        self._alive[key] = number
        self._references[number] = weakref.ref(storage, lambda _: self._died(key, number))
        return number

    def mark(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Says what the tensor's storage is for."""
        self._kinds[self.number(tensor)] = kind

    def _died(self, key: int, number: int) -> None:
        if self._closed:
            return
        self._dies[number] = self.n_ops - 1
        del self._references[number]
        if self._alive.get(key) == number:
            del self._alive[key]

    def close(self) -> tuple[Storage, ...]:
        """All storages seen; those still alive never die (`dies` is the number of ops)."""
        self._closed = True
        self._references.clear()
        return tuple(
            Storage(
                id=number,
                bytes=self._bytes[number],
                born=self._born[number],
                dies=self.n_ops if dies is None else dies,
                kind=self._kinds[number],
            )
            for number, dies in enumerate(self._dies)
        )
