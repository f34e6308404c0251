"""The native part of `blobstore.runtime`, which is what to import instead."""
