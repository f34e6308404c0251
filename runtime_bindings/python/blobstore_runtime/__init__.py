"""The native part of `blobstore.runtime`. Import `blobstore.runtime` instead."""
