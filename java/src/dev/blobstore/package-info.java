/**
 * Programs of ExecuTorch on a cache of weights, which change by name between two calls. Start with {@link
 * dev.blobstore.BlobCache}. What may be null is marked; nothing else may.
 */
@NullMarked
package dev.blobstore;

import org.jspecify.annotations.NullMarked;
