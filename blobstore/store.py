"""The store: keys, contents and tags."""

from blobstore.core.store import *  # noqa: F403 - this module is the public name of that one
from blobstore.core.store import __all__


def __dir__() -> list[str]:
    return list(__all__)
