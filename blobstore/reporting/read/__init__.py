"""Files are cut into regions, each blob is read once, and what looks alike is compared; a cache remembers it."""

from blobstore.reporting.read.cache import Cache, default_path, is_another_file
from blobstore.reporting.read.engine import Engine, Prints, default_executor
from blobstore.reporting.read.fingerprint import Fingerprint, fold_for
from blobstore.reporting.read.listing import list_files, names_of_paths
from blobstore.reporting.read.proofs import Spot, count_differences, find_order, search_payload
from blobstore.reporting.read.stored import stored_share

__all__ = [
    "Cache",
    "Engine",
    "Fingerprint",
    "Prints",
    "Spot",
    "count_differences",
    "default_executor",
    "default_path",
    "find_order",
    "fold_for",
    "is_another_file",
    "list_files",
    "names_of_paths",
    "search_payload",
    "stored_share",
]
