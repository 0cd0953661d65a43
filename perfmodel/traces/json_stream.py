"""Reads large JSON documents piece by piece: the items of one list come as they are parsed, the rest as a mapping.

Plain or gzip, text of any length in memory of a few megabytes. A document that is cut off or is not JSON is refused with
the byte where that shows; with `salvage` whole items are kept and what was lost is counted.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from perfmodel.errors import ConfigError
from perfmodel.units import MEBI

CHUNK_BYTES = 2 * MEBI
MAX_ITEM_CHARS = 16 * MEBI  # an item that does not parse with so much text behind it is no JSON
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for a gzip header and the largest window
_SPACE = re.compile(r"[ \t\n\r]*")
_SEPARATOR = re.compile(r"[ \t\n\r,]*")
_NEXT_ITEM = re.compile(r'\{\s*"(?:ph|name|cat|id|pid|ts)"')
# The scanner of the standard decoder, public but for its name in type stubs; raw control characters are accepted.
_SCAN: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder(strict=False))["scan_once"]
_REPLACED = "\ufffd"


class DamagedError(ConfigError):
    """The document is cut off, or is not JSON, at a position that the message names."""


class ItemList:
    """The same of a document in memory: `items` under the name `list_key`, and the other keys."""

    def __init__(self, items: Sequence[Any], list_key: str, header: dict[str, Any]) -> None:
        self.items, self.list_key, self.header = items, list_key, header
        self.is_list = False
        self.lost: list[str] = []
        self.n_replaced = 0

    def __iter__(self) -> Iterator[Any]:
        """Items in order."""
        return iter(self.items)


def list_key_of(path: Path, keys: tuple[str, ...]) -> str:
    """Which of `keys` names the main list of a document; empty for a bare list, another document or a damaged one."""
    stream = ItemStream(path, keys, salvage=True)
    for _ in stream:
        break
    return stream.list_key


class ItemStream:
    """The items of a document's main list; iterate once, then read `header` and the counts.

    Args:
        path: a JSON file, plain or gzip: a list, or an object that holds the list under one of `keys`.
        keys: names of the main list, such as `traceEvents`.
        salvage: keep whole items of a damaged document.

    Attributes:
        header: the object's other keys (a bare list has none).
        list_key: the name that was found; empty for a bare list or if there is none.
        is_list: the document is a bare list.
        lost: with `salvage`, one line for each piece that was lost.
        n_replaced: characters that were no UTF-8 and were replaced.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], *, salvage: bool = False) -> None:
        self.path, self.keys, self.salvage = path, keys, salvage
        self.header: dict[str, Any] = {}
        self.list_key = ""
        self.is_list = False
        self.lost: list[str] = []
        self.n_replaced = 0
        self._text, self._at, self._dropped_bytes = "", 0, 0
        self._chunks: Iterator[str] = iter(())
        self._ended, self._cut = False, ""

    def __iter__(self) -> Iterator[Any]:
        """Items in order. Raises ConfigError (DamagedError where `salvage` would help)."""
        try:
            with self.path.open("rb") as file:
                self._chunks = self._decoded(file)
                yield from self._document()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror or error}") from error

    def _document(self) -> Iterator[Any]:
        try:
            first = self._peek()
            if first == "[":
                self.is_list = True
                self._at += 1
                yield from self._items()
                self._nothing_behind()
            elif first == "{":
                self._at += 1
                yield from self._members()
                self._nothing_behind()
            elif first:
                value = self._value()
                kind = type(value).__name__
                raise ConfigError(
                    f"{self.path}: found a JSON {kind}; a trace is an object with {self.keys[0]}, or a list"
                )
            else:
                raise self._damage("the file is empty" if not self._cut else self._cut)
        except DamagedError as error:
            if not self.salvage:
                raise
            self.lost.append(str(error).removeprefix(f"{self.path}: "))

    def _nothing_behind(self) -> None:
        if self._peek():
            raise self._damage("text behind the end of the document")
        if self._cut:
            raise self._damage(self._cut)

    def _members(self) -> Iterator[Any]:
        while (mark := self._peek(_SEPARATOR)) != "}":
            if mark != '"':
                raise self._damage("a key in quotes is needed" if mark else "the file ends inside its object")
            key = self._value()
            if self._peek() != ":":
                raise self._damage(f"':' is needed behind {key!r}")
            self._at += 1
            if key in self.keys and self._peek() == "[":
                self.list_key = key
                self._at += 1
                yield from self._items()
            else:
                self.header[key] = self._value()
        self._at += 1

    def _items(self) -> Iterator[Any]:
        scan, separator = _SCAN, _SEPARATOR.match
        while True:
            text, at = self._text, self._at
            try:
                while True:  # the fast path: whole items of the text at hand
                    found = separator(text, at)
                    at = found.end() if found else at
                    item, at = scan(text, at)
                    yield item
            except StopIteration:
                pass
            except (ValueError, RecursionError):
                pass
            self._at = at
            mark = self._peek(_SEPARATOR)
            if mark == "]":
                self._at += 1
                return
            if not mark:
                raise self._damage(self._cut or "the file ends inside its list")
            try:
                yield self._value()
            except DamagedError as error:
                if not self.salvage or not self._resume(error):
                    raise

    def _resume(self, error: DamagedError) -> bool:
        """Goes on at the next thing that looks like an item; False if there is none."""
        start = self._at
        while True:
            found = _NEXT_ITEM.search(self._text, start + 1)
            if found:
                self._at = found.start()
                reason = str(error).removeprefix(f"{self.path}: ")
                self.lost.append(f"{reason}; {found.start() - start} characters passed over")
                return True
            if not self._more():
                return False

    def _value(self) -> Any:
        """The JSON value at the current position, after reading as much as it needs."""
        self._peek()
        while True:
            try:
                value, end = _SCAN(self._text, self._at)
            except StopIteration as error:
                position, reason = int(error.value or self._at), "no JSON value"
            except RecursionError:
                raise self._damage("brackets nested too deeply") from None
            except json.JSONDecodeError as error:
                position, reason = error.pos, error.msg
            except ValueError as error:  # a number of thousands of digits
                position, reason = self._at, str(error)
            else:
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value
                continue
            if len(self._text) - self._at > MAX_ITEM_CHARS or not self._more():
                reason = self._cut or reason.removesuffix(" at")
                raise self._damage(reason, position)

    def _peek(self, skip: re.Pattern[str] = _SPACE) -> str:
        """The next character behind what `skip` matches; empty at the end."""
        while True:
            found = skip.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Reads one more chunk; what lies before the current position is dropped."""
        if self._ended:
            return False
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return False
        before = self._text[: self._at]
        self._dropped_bytes += len(before) if before.isascii() else len(before.encode(errors="replace"))
        self._text, self._at = self._text[self._at :] + chunk, 0
        return True

    def _damage(self, reason: str, position: int | None = None) -> DamagedError:
        ahead = self._text[: self._at if position is None else position]
        at = self._dropped_bytes + len(ahead.encode(errors="replace"))
        kind = reason if reason == self._cut and reason else f"not JSON: {reason}"
        return DamagedError(f"{self.path}: {kind} at byte {at}")

    def _decoded(self, file: BinaryIO) -> Iterator[str]:
        import codecs

        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        for raw in self._unpacked(file):
            text = decoder.decode(raw)
            self.n_replaced += text.count(_REPLACED) if not text.isascii() else 0
            yield text
        yield decoder.decode(b"", final=True)

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        raw = file.read(CHUNK_BYTES)
        if raw[:2] != _GZIP_MAGIC:
            while raw:
                yield raw
                raw = file.read(CHUNK_BYTES)
            return
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            while raw or unpacker.unconsumed_tail:
                yield unpacker.decompress(unpacker.unconsumed_tail + raw, CHUNK_BYTES)
                raw = b"" if unpacker.unconsumed_tail else file.read(CHUNK_BYTES)
                if unpacker.eof and (unpacker.unused_data or raw):
                    raw = unpacker.unused_data + raw
                    unpacker = zlib.decompressobj(_GZIP_WINDOW)
            if not unpacker.eof:
                yield unpacker.flush()
                self._cut = "gzip data cut off"
        except zlib.error as error:
            self._cut = f"gzip data damaged: {error}"
