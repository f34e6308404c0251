"""A base for the tests of data maps and stores; needs pytest and hypothesis.

`NamedDataMapContract` tests the contract of every data map; `strategies` generates layouts, blobs, keys and alignments.
"""

from blobstore.testing.contract import Blob, NamedDataMapContract

__all__ = ["Blob", "NamedDataMapContract"]


def __dir__() -> list[str]:
    return list(__all__)
