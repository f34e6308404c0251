"""What a release needs of a device: a version of ExecuTorch for its programs, and a clock that does not stand before it."""

from __future__ import annotations

import importlib.metadata
import re
import time

from blobstore.core.errors import ReleaseError
from blobstore.releases.index.index import VERSION, Index

__all__ = ["check_executorch", "check_time"]

_DAY = 86_400
_CLOCK_IS_SET = 1_767_225_600  # 2026; there are no releases from before
_LATEST = 4_102_444_800  # 2100


def check_executorch(index: Index, has: str | None, where: str) -> None:
    """Refuse a release whose programs need a newer ExecuTorch.

    Args:
        index: the release.
        has: the version that the device has; None for the one that is installed here, if there is one.
        where: the release, for messages.

    Raises:
        ReleaseError: the device's version is older, or not a version.
    """
    if has is None:
        try:
            has = importlib.metadata.version("executorch")
        except importlib.metadata.PackageNotFoundError:
            return  # the device is another machine, or runs no programs
        has = re.match(r"[0-9.]*[0-9]", has)[0]  # type: ignore[index] # 1.5.0a0+cpu has 1.5.0
    elif not isinstance(has, str) or not re.match(VERSION, has):
        raise ReleaseError(f"{has!r} is not a version of ExecuTorch; expected one such as '1.5'")
    if any(file.kind == "program" for file in index.files) and _numbers(has) < _numbers(index.executorch):
        raise ReleaseError(
            f"{where}: the programs of {index.name} {index.version} need ExecuTorch {index.executorch}, this device has {has}; "
            "executorch (--executorch) names that of another device"
        )


def check_time(published: int, where: str) -> None:
    """Refuse a release from the future: as all older ones are refused after it, it would be the last one.

    It may be a day ahead of the clock. A clock from before 2026 is not set; then it may be of any time before 2100.

    Raises:
        ReleaseError: it is too far ahead.
    """
    clock = int(time.time())
    latest = clock + _DAY if clock >= _CLOCK_IS_SET else _LATEST
    if published > latest:
        raise ReleaseError(
            f"{where}: it was published at {published} seconds after 1970, {published - clock} seconds ahead of this machine's "
            "clock; at most a day is accepted"
        )


def _numbers(version: str) -> list[int]:
    numbers = [int(one) for one in version.split(".")[:4]]
    return numbers + [0] * (4 - len(numbers))
