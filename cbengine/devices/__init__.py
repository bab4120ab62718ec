"""Devices: what executes the work of the step loop, behind one seam (`cbengine.devices.base`)."""

from __future__ import annotations

from cbengine.devices.base import Device, DeviceLostError, Event, MemoryInfo, Stream
from cbengine.devices.inline import InlineDevice
from cbengine.devices.threaded import ThreadedDevice

__all__ = ["Device", "DeviceLostError", "Event", "InlineDevice", "MemoryInfo", "Stream", "ThreadedDevice"]
