"""What the tests of a data map or of a store can build on; needs pytest and hypothesis.

`NamedDataMapContract` is what every data map must keep, `strategies` makes layouts, blobs, keys and alignments.
"""

from blobstore.testing.contract import Blob, NamedDataMapContract

__all__ = ["Blob", "NamedDataMapContract"]
