"""What to profile, as it travels to the processes of the script in an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ENVIRONMENT_KEY = "PERFMODEL_PROFILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Steps to pass over, to time plainly before and after, and to profile; which ranks; where to write.

    `plain` steps are timed without the profiler on either side of the `active` profiled ones, so that drift shows.
    """

    folder: str
    warm_up: int = 10
    plain: int = 5
    active: int = 5
    ranks: tuple[int, ...] = ()
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    keep_running: bool = False

    def to_text(self) -> str:
        """As JSON text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> ProfileSettings:
        """From `to_text`."""
        body = json.loads(text)
        return ProfileSettings(**{**body, "ranks": tuple(body["ranks"])})

    def trace_path(self, rank: int) -> Path:
        """Where a rank's trace goes."""
        return Path(self.folder) / f"rank{rank}.json.gz"

    def times_path(self, rank: int) -> Path:
        """Where a rank's step times go."""
        return Path(self.folder) / f"rank{rank}.steps.json"
