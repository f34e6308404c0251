package dev.blobstore;

import java.util.List;

/** What a folder lacks of a release. */
public final class Missing extends Value {
  /** Bytes to fetch into one file. */
  public static final class Fetch extends Value {
    /** Below the release folder, two folders above that of the index. */
    public final String url;
    /** The value of the header {@code Range}, such as bytes=0-99; empty for all bytes. */
    public final String range;
    /** The number of bytes. */
    public final long size;
    /** The digest of the object: that of the fetched file if there is no range. */
    public final String sha256;
    /** The name in {@link Missing#folder}. */
    public final String file;

    Fetch(String url, String range, long size, String sha256, String file) {
      this.url = url;
      this.range = range;
      this.size = size;
      this.sha256 = sha256;
      this.file = file;
    }
  }

  /** The name of the release. */
  public final String name;
  /** Its version. */
  public final String version;
  /** The digest of its index. */
  public final String sha256;
  /** Whether it is the current release already, whole, so that there is nothing to do. */
  public final boolean current;
  /** The size of all files of the release. */
  public final long releaseBytes;
  /** The size of everything that is missing. */
  public final long bytes;
  /** Where the fetched files go; ends with a separator. */
  public final String folder;
  /** In any order. */
  public final List<Fetch> fetches;

  Missing(
      String name,
      String version,
      String sha256,
      boolean current,
      long releaseBytes,
      long bytes,
      String folder,
      Fetch[] fetches) {
    this.name = name;
    this.version = version;
    this.sha256 = sha256;
    this.current = current;
    this.releaseBytes = releaseBytes;
    this.bytes = bytes;
    this.folder = folder;
    this.fetches = List.of(fetches);
  }
}
