package dev.blobstore;

import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * The current release of a folder in a running program. While it is open, {@link Releases#gc} leaves the files of the
 * release in their place.
 *
 * <pre>{@code
 * try (Release live = Release.open(folder);
 *     Program program = Program.load(live.path() + "/serve.pte", live.cache())) {
 *   Method serve = program.loadMethod("forward");
 *   live.follow(); // after each commit to the folder: the weights of a newer release, in one commit to the cache
 * }
 * }</pre>
 *
 * <p>Its data files are one cache, in which no file covers another one. Adapters are not part of it, because no program
 * takes them by itself; {@link Adapters#load} exchanges them. Any thread may call any method at any time. {@link #follow}
 * waits while another thread follows, and as {@link BlobCache#update}.
 */
public final class Release extends NativeObject {
  /** Which adapters programs run with after a newer release was followed; in the order of the C++ library. */
  public enum FollowAdapters {
    /** Those that are loaded. */
    KEEP,
    /**
     * In place of a loaded adapter that is a file of the release, the file of that name in the newer release, in the same
     * commit and with the same strength. Other adapters stay.
     */
    RELEASE,
  }

  private final BlobCache cache;

  private Release(long pointer) {
    super(pointer);
    cache = new BlobCache(get(Native::releaseCache));
  }

  /** As {@link #open(String, List, PackedStore, String)}, with all data files but adapters. */
  public static Release open(String directory) {
    return open(directory, null, null, new ReleaseOptions().executorch);
  }

  /**
   * Open the current release of a folder.
   *
   * @param data the names of the data files for the cache; null for all but adapters.
   * @param packed where programs on the cache keep packed weights; null for the heap.
   * @param executorch the version of ExecuTorch that the application has; empty accepts all releases.
   * @throws BlobStoreException Release: no release is installed, it has no such data file, two data files have different
   *     contents under one key, or its programs need a newer ExecuTorch. FileAccess, InvalidFile, Integrity; Closed: packed.
   */
  public static Release open(
      String directory, @Nullable List<String> data, @Nullable PackedStore packed, String executorch) {
    String[] names = data == null ? null : data.toArray(new String[0]);
    return new Release(with(packed, p -> Native.openRelease(directory, names, p, executorch)));
  }

  /** Name of the release whose blobs the cache has. */
  public String name() {
    return get(Native::releaseFacts)[0];
  }

  /** Its version. */
  public String version() {
    return get(Native::releaseFacts)[1];
  }

  /** The digest of its index. */
  public String sha256() {
    return get(Native::releaseFacts)[2];
  }

  /** The folder with its files. It stays until a newer release is followed, or this is closed. */
  public String path() {
    return get(Native::releaseFacts)[3];
  }

  /** The files in this folder, and which data files a program takes. */
  public List<InstalledFile> files() {
    return List.of(get(Native::releaseFiles));
  }

  /**
   * A cache on its data files, in mode PRIVATE, which is closed with this. Programs run on it, and it can be changed.
   * {@link BlobCache#revert} restores the files that it was opened on, not the release.
   */
  public BlobCache cache() {
    return cache;
  }

  /** As {@link #follow(FollowAdapters)}, with the adapters that are loaded. */
  public Followed follow() {
    return follow(FollowAdapters.KEEP);
  }

  /**
   * Take the blobs of a newer release into the cache, in one commit, if another one was committed to the folder, by this
   * process or another one. Each call of a program has all old weights or all new ones. Only blobs that differ between the
   * two releases are committed, so other changes stay. If more than blobs changed, or a loaded adapter does not fit the
   * newer foundation, nothing is committed, and the result says why.
   *
   * @throws BlobStoreException as {@link #open} and {@link BlobCache#update}. The cache is unchanged then.
   */
  public Followed follow(FollowAdapters adapters) {
    return get(release -> Native.followRelease(release, adapters.ordinal()));
  }

  /** Close the cache, and let {@link Releases#gc} remove the release once it is no longer current. Programs go on. */
  @Override
  public void close() {
    cache.close();
    super.close();
  }

  @Override
  String about() {
    return name() + " " + version() + " in " + path();
  }
}
