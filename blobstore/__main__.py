"""`python -m blobstore` is the `blobstore` command."""

from blobstore.cli import main

main()
