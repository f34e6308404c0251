"""What the programs of a release need of a device: a version of ExecuTorch."""

from __future__ import annotations

import importlib.metadata
import re

from blobstore.errors import ReleaseError
from blobstore.releases.index import VERSION, Index

__all__ = ["check_executorch"]


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


def _numbers(version: str) -> list[int]:
    numbers = [int(one) for one in version.split(".")[:4]]
    return numbers + [0] * (4 - len(numbers))
