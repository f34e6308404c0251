package dev.blobstore;

import java.util.List;

/**
 * Packed weights on disk: the form that XNNPACK computes from weights, made once and mapped by every later load. Pass it
 * to {@link BlobCache#open} or {@link Program#load}.
 *
 * <p>Any number of threads and processes may use a folder. If no file can be used or written, weights are packed on the
 * heap, as without a store, and {@link #stats} has the reason.
 */
public final class PackedStore extends NativeObject {
  /** The size of all files together that {@link #open(String)} allows, in bytes. */
  public static final long DEFAULT_LIMIT = 4L << 30;

  /** How much a load asks the system to read by default, in bytes. */
  public static final long DEFAULT_READ_AHEAD = 16L << 20;

  private PackedStore(long pointer) {
    super(pointer);
  }

  /** As {@link #open(String, long, boolean)}, with the default limit, and verified when a file is new or has changed. */
  public static PackedStore open(String folder) {
    return open(folder, DEFAULT_LIMIT, false);
  }

  /** As {@link #open(String, long, boolean, long)}, with the default of what is read ahead. */
  public static PackedStore open(String folder, long limit, boolean verify) {
    return open(folder, limit, verify, DEFAULT_READ_AHEAD);
  }

  /**
   * Open a folder, which is made when the first file is written.
   *
   * @param limit the size of all files together, in bytes; files that no living process uses are removed to stay below.
   * @param verify compare the file with its digests at every load.
   * @param readAhead how many bytes of the packed weights of a method, from those on that a call needs first, a load asks
   *     the system to read where they are not in memory, while the load returns and the first call computes; never more
   *     than half of the memory that the process can have. With 0, pages are read when they are used.
   * @throws BlobStoreException.FileAccess the path exists and is not a folder.
   */
  public static PackedStore open(String folder, long limit, boolean verify, long readAhead) {
    notNegative("limit", limit);
    notNegative("readAhead", readAhead);
    return new PackedStore(Native.openPacked(folder, limit, verify, readAhead));
  }

  private static void notNegative(String what, long number) {
    if (number < 0) {
      throw new IllegalArgumentException(what + " is " + number + ", which is negative");
    }
  }

  /** What happened through this object in this process. */
  public PackedStats stats() {
    return get(Native::packedStats);
  }

  /** The files, the most recently used first. @throws BlobStoreException.FileAccess the folder cannot be read. */
  public List<PackedFile> list() {
    return List.of(get(Native::packedList));
  }

  /** As {@link #list}, and compare all bytes with their digests. Removes nothing. */
  public List<PackedFile> verify() {
    return List.of(get(Native::packedVerify));
  }

  /**
   * Remove what killed processes left, damaged and replaced files, and then those that exceed the limit.
   *
   * @return what was removed.
   * @throws BlobStoreException.FileAccess something cannot be removed.
   */
  public List<PackedFile> gc() {
    return List.of(get(Native::packedGc));
  }
}
