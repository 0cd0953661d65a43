"""Groups of ranks as people write them: `0-3,8,12-15`."""

from __future__ import annotations

import re

from perfmodel.errors import ConfigError

_PART = re.compile(r"\s*([0-9]{1,7})\s*(?:-\s*([0-9]{1,7})\s*)?")


def parse_ranks(text: str, n_ranks: int, where: str = "group") -> tuple[int, ...]:
    """Ranks in the order written; `all` is every rank.

    Raises:
        ConfigError: text that is no list of ranks and ranges, a rank twice, or one that the machine does not have.

    >>> parse_ranks("0-2,7", 8)
    (0, 1, 2, 7)
    """
    if text.strip() == "all":
        return tuple(range(n_ranks))
    ranks: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ConfigError(f"{where}: found {text!r}, allowed ranks and ranges such as 0-3,8, or all")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first or last >= n_ranks:
            raise ConfigError(f"{where}: found {part.strip()!r}, allowed ranks 0 to {n_ranks - 1}, low-high")
        ranks += range(first, last + 1)
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"{where}: a rank is twice in {text!r}")
    return tuple(ranks)
