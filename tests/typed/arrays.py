"""Files without torch, as a user of types writes it."""

import sys
from pathlib import Path

import numpy as np

import blobstore
import blobstore.numpy
from blobstore import BlobStore, open_ptd


def work(at: Path) -> None:
    blobstore.save_file({"a": np.ones((4, 8), np.float32)}, at / "a.ptd")
    with open_ptd(at / "a.ptd") as data:
        array, layout, found = data.numpy("a"), data.get_tensor_layout("a"), data.bytes("a")
        print(array.shape, array * 2, layout, len(found), data.digest("a").nbytes)
    arrays, more = blobstore.numpy.load_file(at / "a.ptd"), blobstore.numpy.load((at / "a.ptd").read_bytes())
    whole, part = arrays["a"], arrays["a"][0:2]
    print(whole.shape, part.dtype.name, whole.T, more["a"].nbytes)
    store = BlobStore(base=at / "a.ptd")
    address, report = store.add("b", whole), blobstore.report(at)
    print(address, store.stats.base_keys, report.total_bytes, [finding.saves for finding in report.findings])


if __name__ == "__main__":
    work(Path(sys.argv[1]))
