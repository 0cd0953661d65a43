"""Devices and their fits: find, load, check, write. The only room that touches `kernels_db/`."""

from perfmodel.db.adding import add_device
from perfmodel.db.check import DbReport, check_db
from perfmodel.db.device import Device, Fit, HostCosts
from perfmodel.db.fits import read_fit, write_fit
from perfmodel.db.inherit import inherit_fits
from perfmodel.db.loading import db_root, list_devices, load_device, load_shared, resolve_device

__all__ = [
    "DbReport",
    "Device",
    "Fit",
    "HostCosts",
    "add_device",
    "check_db",
    "db_root",
    "inherit_fits",
    "list_devices",
    "load_device",
    "load_shared",
    "read_fit",
    "resolve_device",
    "write_fit",
]
