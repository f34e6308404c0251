"""What files must agree on that are written in one language and read in the other.

`runtime_bindings/src/format/constants.h` is made of this module by `make constants`.
"""

# Keys and metadata of data files
KEY_PREFIX = "metadata.blobstore."  # of keys that belong to blobstore: records, lists of checkpoints
OF_PROGRAMS_KEY = "blobstore.programs"  # of files that are written together with programs, whose keys belong to these
WORKING_COPY_KEY = "blobstore.working_copy"  # of working copies alone, each with an id that no other one has
FOUNDATION_KEY = "blobstore.adapter.foundation"  # the fingerprint of what an adapter was made for
SCALE_KEY = "blobstore.adapter.scale"  # alpha / rank
PEFT_KEY = "blobstore.adapter.peft"  # what PEFT's form of an adapter has besides
SEGMENT_ALIGNMENT = 128  # bytes

# The manifest of a data file
MANIFEST_IDENTIFIER = b"BM01"
MANIFEST_MAGIC = b"BLOBMAN1"

# What a delegate has beside the payload of the backend inside
BACKEND_ID = "BlobStoreBackend"
PAYLOAD_IDENTIFIER = b"BD01"
PAYLOAD_MAGIC = b"BSDELEG1"
PAYLOAD_VERSION = 1
MOST_HOLES = 8  # of one constant, so that a small program does not become a large payload
KEY_VERSION_SIZE = 16  # bytes at the end of a key that the delegate replaces

# Records of a delegate
RECORDS_IDENTIFIER = b"BR01"
RECORDS_VERSION = 0

# Releases
INDEX_LIMIT = 1 << 26  # bytes of the largest index
TABLE_LIMIT = 1 << 28  # bytes of the largest table
HOLE_LIMIT = 1 << 20  # zeros between two parts of a file
MOST_FILES = 100_000  # of a release
MOST_GAP = 1 << 14  # bytes between two ranges that cost less than another request
