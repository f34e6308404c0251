package dev.blobstore;

import java.util.Objects;

/** What a release must be. Each method changes this object and returns it. For one thread at a time. */
public final class ReleaseOptions {
  // native code reads these
  private String sha256 = "";
  private String name = "";
  private String version = "";
  String executorch = "1.5";
  private String ways = "";
  private boolean allowRollback = false;
  private boolean plain = false;

  /**
   * The SHA-256 that the index must have, in lower case hexadecimal digits. Without it, check the signature of the index
   * first: this library has no cryptography for keys.
   */
  public ReleaseOptions sha256(String value) {
    sha256 = Objects.requireNonNull(value);
    return this;
  }

  /** The name that the index must have, that of the URL that it came from. */
  public ReleaseOptions name(String value) {
    name = Objects.requireNonNull(value);
    return this;
  }

  /** The version that the index must have, that of the URL that it came from. */
  public ReleaseOptions version(String value) {
    version = Objects.requireNonNull(value);
    return this;
  }

  /** The version of ExecuTorch that the application has, by default 1.5; empty accepts all releases. */
  public ReleaseOptions executorch(String value) {
    executorch = Objects.requireNonNull(value);
    return this;
  }

  /** A file with the list of the ways to the contents; by default {@code ways.json.zst} beside the index. */
  public ReleaseOptions ways(String value) {
    ways = Objects.requireNonNull(value);
    return this;
  }

  /** Accept a release that is older than the installed one. */
  public ReleaseOptions allowRollback(boolean value) {
    allowRollback = value;
    return this;
  }

  /** Decode nothing: only bytes that are stored as they are are listed. */
  public ReleaseOptions plain(boolean value) {
    plain = value;
    return this;
  }
}
