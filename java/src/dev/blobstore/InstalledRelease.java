package dev.blobstore;

/** A release that is the current one of a folder. */
public final class InstalledRelease extends Value {
  /** Its name. */
  public final String name;
  /** Its version. */
  public final String version;
  /** The digest of its index. */
  public final String sha256;
  /** The folder with its files, which are links. */
  public final String path;
  /** Whether another release was the current one before. */
  public final boolean changed;
  /** The size of all its files. */
  public final long releaseBytes;

  InstalledRelease(String name, String version, String sha256, String path, boolean changed, long releaseBytes) {
    this.name = name;
    this.version = version;
    this.sha256 = sha256;
    this.path = path;
    this.changed = changed;
    this.releaseBytes = releaseBytes;
  }
}
