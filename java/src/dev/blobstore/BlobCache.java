package dev.blobstore;

import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import org.jspecify.annotations.Nullable;

/**
 * Blobs of any number of {@code .ptd} files in memory: looked up as one map, and changed while programs run on them.
 *
 * <pre>{@code
 * try (BlobCache cache = BlobCache.open("model.ptd");
 *     Program program = Program.load("model.pte", cache);
 *     Method forward = program.loadMethod("forward")) {
 *   float[] scores = forward.execute(Tensor.of(new float[] {0.5f, -0.5f}, 1, 2)).tensor(0).floats();
 * }
 * }</pre>
 *
 * Any thread may call any method at any time. Commits ({@link #update}, {@link #load}, {@link #revert}) run one at a
 * time and wait for calls of methods that are running; {@link #dirty}, {@link #stats}, {@link #verify} and {@link
 * #blob} wait while a commit changes bytes. Opening in mode SHARED waits while other processes use the file. Nothing
 * else waits.
 *
 * <p>The files are mapped: replace them by renaming, and never truncate one, because the system ends a process that
 * reads a lost page.
 */
public final class BlobCache extends NativeObject {
  /** How a cache takes its files; in the order of the C++ library. */
  public enum Mode {
    /** Maps the files. A write copies its page, and no other process sees commits. */
    PRIVATE,
    /** One file, a working copy, that several processes map and change together. */
    SHARED,
    /** Reads the files into memory. Nothing that happens to the files later matters. */
    COPY,
  }

  /** Counted or measured, never estimated. */
  public static final class Stats extends Value {
    /** The number of keys, with those of the base. */
    public final long keys;
    /** Address space of this cache in bytes, without its base. */
    public final long mappedBytes;
    /** Of that, the bytes in memory now; empty where the system cannot say it. */
    public final OptionalLong residentBytes;
    /** Of that, the memory of this process alone; empty where the system cannot say it. */
    public final OptionalLong privateBytes;
    /** Keys whose bytes differ, or may differ, from those of the files. */
    public final long dirtyKeys;
    /** The size of these in bytes. */
    public final long dirtyBytes;
    /** Commits through this object, in this process. */
    public final long commits;
    /** Reverts through this object, in this process. */
    public final long reverts;

    Stats(long[] values) {
      keys = values[0];
      mappedBytes = values[1];
      residentBytes = values[2] < 0 ? OptionalLong.empty() : OptionalLong.of(values[2]);
      privateBytes = values[3] < 0 ? OptionalLong.empty() : OptionalLong.of(values[3]);
      dirtyKeys = values[4];
      dirtyBytes = values[5];
      commits = values[6];
      reverts = values[7];
    }
  }

  BlobCache(long pointer) {
    super(pointer);
  }

  /** As {@link #open(List, Mode, BlobCache, PackedStore)}, in mode PRIVATE. No file at all gives an empty cache. */
  public static BlobCache open(String... paths) {
    return open(Arrays.asList(paths), Mode.PRIVATE, null, null);
  }

  /** As {@link #open(List, Mode, BlobCache, PackedStore)}, without base or packed store. */
  public static BlobCache open(List<String> paths, Mode mode) {
    return open(paths, mode, null, null);
  }

  /**
   * Open files and check whether they can be trusted. If several files hold a key, its contents must be equal in all.
   *
   * @param base a cache in which this one looks up keys that no file here has, such as a foundation under an adapter;
   *     its memory is shared, and its commits are seen here. May be null, and closed before this one.
   * @param packed where programs on this cache keep packed weights. Null takes that of the base.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, KeyConflict, Unsupported; Closed: base or packed.
   */
  public static BlobCache open(List<String> paths, Mode mode, @Nullable BlobCache base, @Nullable PackedStore packed) {
    String[] names = paths.toArray(new String[0]);
    return new BlobCache(with(base, b -> with(packed, p -> Native.openCache(names, mode.ordinal(), b, p))));
  }

  /**
   * Write the blobs of some {@code .ptd} files to one file for mode SHARED.
   *
   * @return the size of the file in bytes.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, KeyConflict, OutputPath and others, as {@link #save}.
   *     After an error the target is unchanged.
   */
  public static long makeWorkingCopy(List<String> paths, String target) {
    return Native.makeWorkingCopy(paths.toArray(new String[0]), target);
  }

  /** The files, for messages. */
  public String name() {
    return get(Native::cacheName);
  }

  /** The keys: those of the files in file order, then those that only the base has. */
  public List<String> keys() {
    return List.of(get(Native::cacheKeys));
  }

  /** Whether there is a blob with this key, here or in the base. */
  public boolean contains(String key) {
    return get(cache -> Native.cacheContains(cache, key));
  }

  /** Whether the key is in this cache's own files, so that it can be changed here. */
  public boolean owns(String key) {
    return get(cache -> Native.cacheOwns(cache, key));
  }

  /**
   * A copy of a blob, from one generation. Opaque bytes come as UINT8 of one dimension.
   *
   * @throws BlobStoreException KeyNotFound; UnsupportedData: it is larger than a ByteBuffer can be.
   */
  public Tensor blob(String key) {
    return get(cache -> Native.cacheBlob(cache, key));
  }

  /** A number that grows with every commit or revert, here or in the base. */
  public long generation() {
    return get(Native::cacheGeneration);
  }

  /** The generation of a key's last change; 0 if it never changed. @throws BlobStoreException.KeyNotFound if unknown. */
  public long version(String key) {
    return get(cache -> Native.cacheVersion(cache, key));
  }

  /**
   * Change all of these blobs or none. Tensors are given as the files store them; {@link LogicalTensors} takes them as
   * the model has them. Blobs of opaque bytes take any tensor of their size. The tensors are read during the call.
   *
   * @return the new generation.
   * @throws BlobStoreException KeyNotFound, Layout, Unsupported; Program: a delegate refuses the new bytes. After an
   *     error nothing was changed.
   */
  public long update(Map<String, Tensor> blobs) {
    Named named = new Named(blobs);
    return get(cache -> Native.cacheUpdate(cache, named));
  }

  /**
   * Commit the blobs that a {@code .ptd} holds, such as one that {@link #save} wrote.
   *
   * @return the new generation.
   * @throws BlobStoreException as {@link #open} and {@link #update}; after an error nothing was changed.
   */
  public long load(String path) {
    return get(cache -> Native.cacheLoad(cache, path));
  }

  /**
   * Restore the bytes of the files.
   *
   * @return the new generation.
   * @throws BlobStoreException Unsupported: a shared working copy has no older bytes. FileAccess: a file was truncated.
   *     After an error nothing was changed.
   */
  public long revert() {
    return get(Native::cacheRevert);
  }

  /** As {@link #revert()}, for some keys. @throws BlobStoreException KeyNotFound, also. */
  public long revert(List<String> keys) {
    String[] names = keys.toArray(new String[0]);
    return get(cache -> Native.cacheRevertKeys(cache, names));
  }

  /**
   * Write the blobs of this cache's files, all from one generation, to a {@code .ptd}. At every moment the path is the
   * old file or the new one, complete.
   *
   * @param dirtyOnly only the blobs that were changed: a delta for {@link #load}.
   * @return the size of the file in bytes.
   * @throws BlobStoreException OutputPath: the cache maps the file, or it is of another kind. FileAccess, InvalidKey,
   *     InvalidAlignment, DataChanged. After an error the path is unchanged.
   */
  public long save(String path, boolean dirtyOnly) {
    return get(cache -> Native.cacheSave(cache, path, dirtyOnly));
  }

  /** Keys of this cache's files whose bytes differ, or may differ, from those of the files. */
  public List<String> dirty() {
    return List.of(get(Native::cacheDirty));
  }

  /** Check that the files are still as long as when they were opened. @throws BlobStoreException.FileAccess if not. */
  public void checkFiles() {
    run(Native::cacheCheckFiles);
  }

  /**
   * Compare the blobs in memory with the digests of the files; blobs that were changed here are skipped.
   *
   * @return whether every file had digests.
   * @throws BlobStoreException Integrity; FileAccess: a file was truncated.
   */
  public boolean verify() {
    return get(Native::cacheVerify);
  }

  /** What is in memory, and what happened. */
  public Stats stats() {
    return new Stats(get(Native::cacheStats));
  }

  @Override
  String about() {
    return name() + ", " + keys().size() + " keys, generation " + generation();
  }
}
