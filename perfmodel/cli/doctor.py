"""`perfmodel doctor`: what is installed, what is calibrated and how old that is, and what would change accuracy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from perfmodel.cli.console import Waiting, stdout_width

if TYPE_CHECKING:
    from datetime import date

    from perfmodel.db.device import Device

JSON_SCHEMA_VERSION = 1
# Package -> what it is for. Only torch is always needed; the others come with an extra.
PACKAGES = {
    "torch": "extracting models",
    "numpy": "everything",
    "jinja2": "--html (extra report)",
    "matplotlib": "--plot, topo show --out (extra plot)",
    "pandas": "to_pandas, Parquet (extra report)",
    "dask": "sweeps on a cluster (extra dask)",
    "transformers": "Hugging Face models of other kinds",
}
OLD_DAYS = 365  # software moves this much in a year: PyTorch and CUDA have made at least two minor releases


@click.command(epilog="Example: perfmodel doctor --device h100_sxm")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--device", "devices", multiple=True, help="Only this device; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
def doctor(db: str | None, devices: tuple[str, ...], *, as_json: bool) -> None:
    """Say what is installed, which devices are calibrated and how old that is, and what would make answers surer."""
    from perfmodel.db import list_devices, load_device
    from perfmodel.db.loading import db_root
    from perfmodel.extract.cache import cache_folder

    with Waiting("reading the device database"):
        rows = [device_state(load_device(name, db)) for name in devices or list_devices(db)]
    body = {
        "schema_version": JSON_SCHEMA_VERSION,
        "packages": packages(),
        "database": str(db_root(db)),
        "graph_cache": str(cache_folder()),
        "devices": rows,
    }
    click.echo(json.dumps(body, indent=2) if as_json else _render(body), nl=as_json)


def packages() -> list[dict[str, str]]:
    """Version of perfmodel, Python and every package above; `missing` where it is not installed."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = [{"package": "python", "version": platform.python_version(), "for": ""}]
    for name, use in {"perfmodel": "", **PACKAGES}.items():
        try:
            found.append({"package": name, "version": version(name), "for": use})
        except PackageNotFoundError:
            found.append({"package": name, "version": "missing", "for": use})
    return found


def device_state(device: Device) -> dict[str, Any]:
    """How many families are fitted to this device and how many derived, the age of the newest fit, and what would help."""
    from perfmodel.estimate import Source

    fitted = sorted(name for name, fit in device.fits.items() if fit.source is Source.FITTED)
    derived = sorted(set(device.fits) - set(fitted))
    dates = sorted(found for name in fitted if (found := _date(device.fits[name].provenance.get("date", ""))))
    return {
        "device": device.name,
        "fitted": fitted,
        "derived": derived,
        "newest_fit": dates[-1].isoformat() if dates else None,
        "advice": _advice(device, fitted, derived, dates[-1] if dates else None),
    }


def _date(words: str) -> date | None:
    from datetime import date as day

    try:
        return day.fromisoformat(words[:10])
    except ValueError:
        return None


def _advice(device: Device, fitted: list[str], derived: list[str], newest: date | None) -> str:
    from datetime import UTC, datetime

    command = "perfmodel calibrate kernels"
    if not fitted:
        return f"nothing was measured on it (nearest: {device.nearest or 'none'}): {command} on one would help most"
    if newest is not None and (datetime.now(tz=UTC).date() - newest).days > OLD_DAYS:
        return f"its newest fit is over a year old: {command}"
    if derived:
        return f"{command} would replace {len(derived)} derived famil{'y' if len(derived) == 1 else 'ies'}"
    return "all families are fitted"


def _render(body: dict[str, Any]) -> str:
    from perfmodel.report.listing import render_rows

    rows = [
        {
            "device": row["device"],
            "fitted": ", ".join(row["fitted"]) or "-",
            "derived": str(len(row["derived"])),
            "newest fit": row["newest_fit"] or "-",
            "what would help": row["advice"],
        }
        for row in body["devices"]
    ]
    width = max(stdout_width(), 100)
    return (
        f"{render_rows(body['packages'], width)}\ndevice database  {body['database']}\n"
        f"graph cache      {body['graph_cache']}\n{render_rows(rows, width)}"
    )
