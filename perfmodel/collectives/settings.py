"""What the NCCL_* variables of a topology, and a caller, force or forbid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from perfmodel.collectives.nccl_tables import MAX_CHANNELS, Algorithm, Protocol
from perfmodel.errors import ConfigError, suggest

_Name = TypeVar("_Name", Algorithm, Protocol)
_ALGORITHMS = {
    "ring": Algorithm.RING,
    "tree": Algorithm.TREE,
    "nvls": Algorithm.NVLS,
    "nvlstree": Algorithm.NVLS_TREE,
    "nvls_tree": Algorithm.NVLS_TREE,
}
_PROTOCOLS = {"ll": Protocol.LL, "ll128": Protocol.LL128, "simple": Protocol.SIMPLE}
# NCCL knows these too; no machine here has what they need.
_IGNORED = frozenset({"collnetdirect", "collnetchain", "collnet", "pat"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Allowed algorithms and protocols, bounds on the number of channels, and the library version (empty: not said)."""

    algorithms: frozenset[Algorithm]
    protocols: frozenset[Protocol]
    min_channels: int = 1
    max_channels: int = MAX_CHANNELS
    version: str = ""


def read_settings(env: Mapping[str, str], algo: str | None = None, proto: str | None = None) -> Settings:
    """Settings from NCCL_ALGO, NCCL_PROTO, NCCL_NVLS_ENABLE, NCCL_{MIN,MAX}_NCHANNELS, NCCL_VERSION; arguments win.

    Raises ConfigError with every mistake: variable, what was found, what is allowed.
    """
    problems: list[str] = []
    algorithms = _choice("NCCL_ALGO", env.get("NCCL_ALGO"), _ALGORITHMS, problems)
    protocols = _choice("NCCL_PROTO", env.get("NCCL_PROTO"), _PROTOCOLS, problems)
    if algo is not None:
        algorithms = _choice("--algo", algo, _ALGORITHMS, problems)
    if proto is not None:
        protocols = _choice("--proto", proto, _PROTOCOLS, problems)
    if algo is None and env.get("NCCL_NVLS_ENABLE") == "0":
        algorithms -= {Algorithm.NVLS, Algorithm.NVLS_TREE}
    low = _whole("NCCL_MIN_NCHANNELS", env, 1, problems)
    high = _whole("NCCL_MAX_NCHANNELS", env, MAX_CHANNELS, problems)
    if problems:
        raise ConfigError(problems)
    return Settings(
        algorithms=frozenset(algorithms),
        protocols=frozenset(protocols),
        min_channels=min(low, high),
        max_channels=high,
        version=env.get("NCCL_VERSION", ""),
    )


def _choice(name: str, text: str | None, known: Mapping[str, _Name], problems: list[str]) -> set[_Name]:
    """The members of a list such as `ring,tree`, or all others of one such as `^tree`."""
    if text is None or not text.strip():
        return set(known.values())
    words = [word.strip().lower() for word in text.strip().removeprefix("^").split(",")]
    unknown = [word for word in words if word not in known and word not in _IGNORED]
    if unknown:
        problems.append(f"{name}: found {unknown[0]!r}, allowed {', '.join(known)}{suggest(unknown[0], known)}")
    named = {known[word] for word in words if word in known}
    return set(known.values()) - named if text.strip().startswith("^") else named


def _whole(name: str, env: Mapping[str, str], default: int, problems: list[str]) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CHANNELS:
        problems.append(f"{name}: found {text!r}, allowed a whole number from 1 to {MAX_CHANNELS}")
        return default
    return int(text)
