package dev.blobstore;

import java.io.IOException;
import java.util.Objects;

/**
 * Releases in an application that downloads itself: what to fetch, and one switch to what was fetched. Nothing here uses
 * the network.
 *
 * <pre>{@code
 * // INDEX was fetched from https://models.example.com/assistant/1.3/index.json, and beside it ways.json.zst
 * Missing todo = Releases.missing(INDEX, folder, options);
 * while (!todo.fetches.isEmpty()) {
 *   for (Missing.Fetch one : todo.fetches) {
 *     download("https://models.example.com/" + one.url, one.range, todo.folder + one.file);
 *   }
 *   todo = Releases.missing(INDEX, folder, options);
 * }
 * InstalledRelease release = Releases.commit(INDEX, folder, options); // release.path has the files
 * }</pre>
 *
 * Any thread may call these at any time. They wait for other threads and processes that pull into the folder.
 */
public final class Releases {
  private Releases() {}

  /**
   * Find what a folder lacks of a release. Contents that are here are compared with their digests, so this reads them.
   *
   * @param index a file with the index of the release.
   * @param directory the folder of the device; it is made if it is missing.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, Release; Trust: the index has another digest, name or
   *     version than the options say, or is older than the installed one.
   */
  public static Missing missing(String index, String directory, ReleaseOptions options) {
    return Native.missing(index, directory, options);
  }

  /**
   * Make a release the current one of a folder, from what was fetched. All bytes are compared with their digests before
   * anything refers to them. At every moment {@code current} leads to the old release or to the new one, whole, also if
   * the process is killed; then call it again.
   *
   * @throws BlobStoreException Transfer: something was not fetched. Integrity: what was fetched is wrong; it was removed,
   *     so that {@link #missing} lists it again. Otherwise as {@link #missing}. The old release stays current.
   */
  public static InstalledRelease commit(String index, String directory, ReleaseOptions options) {
    return Native.commit(index, directory, options);
  }

  /** The downloader of the application, or of the system. */
  @FunctionalInterface
  public interface Download {
    /**
     * Fetch bytes of a URL into a file, which may be replaced.
     *
     * @param range the value of the header {@code Range}; empty for all bytes. It may be ignored.
     */
    void fetch(String url, String range, String file) throws IOException;
  }

  /**
   * Take a release by the downloader of the application: fetch its index, call {@link #missing}, fetch what that lists,
   * and call {@link #commit}. Where the release is the current one already, nothing but the index is fetched. To require a
   * signature, let {@code download} check the index, which it fetches first.
   *
   * @param url that of the index in a release folder, without a query: …/assistant/1.3/index.json, or that of latest.
   * @param directory the folder of the device; it is made if it is missing.
   * @param download called in this thread.
   * @throws IOException from {@code download}. What was fetched before is not fetched again.
   * @throws BlobStoreException Input: the URL is not that of an index in a release folder. Or as {@link #missing} and
   *     {@link #commit}. The old release stays current.
   */
  public static InstalledRelease pull(String url, String directory, Download download, ReleaseOptions options)
      throws IOException {
    Objects.requireNonNull(download);
    return Native.pull(url, directory, options, download);
  }

  /**
   * Remove from a folder what its newest releases do not need.
   *
   * @param keep how many releases stay, with the current one; at least 1.
   * @throws BlobStoreException Release: no release is installed there, or keep is below 1. FileAccess, InvalidFile,
   *     Integrity.
   */
  public static Collected gc(String directory, long keep) {
    return new Collected(Native.gc(directory, Math.max(keep, 0)));
  }

  /** What {@link #gc} removed. */
  public static final class Collected extends Value {
    /** The number of releases. */
    public final long releases;
    /** The number of files. */
    public final long files;
    /** Their size in bytes. */
    public final long bytes;
    /** Releases that stay only because a process has them open. */
    public final long inUse;

    Collected(long[] values) {
      releases = values[0];
      files = values[1];
      bytes = values[2];
      inUse = values[3];
    }
  }
}
