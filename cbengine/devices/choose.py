"""Which device a config asks for."""

from __future__ import annotations

from cbengine.config import EngineConfig
from cbengine.devices.base import Device
from cbengine.devices.inline import InlineDevice
from cbengine.devices.threaded import ThreadedDevice
from cbengine.errors import UnsupportedFeatureError


def make_device(config: EngineConfig) -> Device:
    """The device for `config`. On a CPU: worker threads as streams, or everything at once without async batching.

    Raises:
        UnsupportedFeatureError: a device that is not served.
    """
    if config.device not in (None, "cpu"):
        raise UnsupportedFeatureError(f"device {config.device!r} is not served; supported is 'cpu'")
    if config.use_async_batching is False:
        return InlineDevice()
    return ThreadedDevice(num_threads=config.num_threads)
