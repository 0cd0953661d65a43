"""All findings of a job, largest gain first."""

from __future__ import annotations

from perfmodel.db.device import Device
from perfmodel.diagnose.computation import find_computation
from perfmodel.diagnose.distributed import find_distributed
from perfmodel.diagnose.finding import Finding
from perfmodel.diagnose.gains import Replayer
from perfmodel.diagnose.interruptions import find_interruptions
from perfmodel.diagnose.memory import find_memory
from perfmodel.diagnose.view import make_view
from perfmodel.traces.ranks import Job

LEAST_GAIN_FRAC = 0.01  # of the step: less is within the noise of a measurement


def diagnose(job: Job, device: Device) -> tuple[Finding, ...]:
    """What keeps the ranks of a job, which ran on `device`, from being faster; gains do not add up, as causes overlap."""
    view = make_view(job, device)
    replayer = Replayer(view)
    found = [
        finding
        for find in (find_interruptions, find_computation, find_distributed, find_memory)
        for finding in find(view, replayer)
    ]
    found = [finding for finding in found if finding.gain_frac >= LEAST_GAIN_FRAC or "not predicted" in finding.basis]
    return tuple(sorted(found, key=lambda finding: (-finding.gain_s, finding.cause.id)))
