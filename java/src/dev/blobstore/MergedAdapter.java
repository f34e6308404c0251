package dev.blobstore;

import java.util.List;

/**
 * An adapter that {@link Adapters#merge} added to the weights of a cache. Holds the cache, and the previous bytes of
 * weights that already differed from the cache's file. Closing it gives these up and leaves the adapter merged.
 */
public final class MergedAdapter extends NativeObject {
  MergedAdapter(long pointer) {
    super(pointer);
  }

  /** The names of the weights that were changed. */
  public List<String> weights() {
    return List.of(get(Native::mergedWeights));
  }

  /** The generation of the commit that changed them. */
  public long generation() {
    return get(Native::mergedGeneration);
  }

  /** Whether {@link #undo} was called. */
  public boolean undone() {
    return get(Native::mergedUndone);
  }

  /**
   * Restore the exact bytes that the weights had before, in one commit.
   *
   * @return the new generation.
   * @throws BlobStoreException.Adapter it was undone already, or the weights were changed since. Nothing was changed.
   */
  public long undo() {
    return get(Native::mergedUndo);
  }
}
