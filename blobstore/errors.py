"""Every error that blobstore raises, in one tree; `blobstore.core.errors` draws it."""

from blobstore.core.errors import *  # noqa: F403 - this module is the public name of that one
from blobstore.core.errors import __all__


def __dir__() -> list[str]:
    return list(__all__)
