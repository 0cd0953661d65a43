"""`perfmodel devices`: list devices, show one, add one from its datasheet."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(invoke_without_command=True, epilog="Example: perfmodel devices")
@click.option("--db", type=click.Path(), help="Device database to use instead of the shipped one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.pass_context
def devices(context: click.Context, db: str | None, *, as_json: bool) -> None:
    """List the known devices, or add one from its datasheet."""
    if context.invoked_subcommand is not None:
        return
    from perfmodel.cli.listings import show
    from perfmodel.db import list_devices, load_device
    from perfmodel.report.listing import device_row

    show("devices", [device_row(load_device(name, db)) for name in list_devices(db)], as_json=as_json)


@devices.command("add", epilog="Example: perfmodel devices add my_gpu.yaml --db ./kernels_db")
@click.argument("datasheet", type=click.Path(path_type=Path))
@click.option("--db", required=True, type=click.Path(path_type=Path), help="Database folder to add it to.")
def add(datasheet: Path, db: Path) -> None:
    """Add a device from DATASHEET, a YAML file like kernels_db/<device>/device.yaml.

    Its efficiencies are inherited from the nearest measured device and marked `derived`.
    """
    from perfmodel.db import add_device
    from perfmodel.db.fits import INHERITED_KEY

    device = add_device(datasheet, db)
    found = [f"{name} from {fit.provenance[INHERITED_KEY]}" for name, fit in sorted(device.fits.items())]
    click.echo(f"added {device.name}; fits inherited: {', '.join(found) or 'none'}")
