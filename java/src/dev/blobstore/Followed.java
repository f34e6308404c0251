package dev.blobstore;

import java.util.List;

/** What {@link Release#follow} did. */
public final class Followed extends Value {
  /** The version of the release that is current in the folder. */
  public final String version;
  /** The digest of its index. */
  public final String sha256;
  /** Whether the cache has its blobs: it had them already, or they were committed. */
  public final boolean taken;
  /** The keys whose blobs were committed. */
  public final List<String> keys;
  /** Why it was not taken: programs, keys, layouts, adapters that do not fit. */
  public final List<String> reasons;
  /**
   * What is new, changed or gone of adapters that the cache was not opened on, and of files other than programs and data,
   * such as tokenizers. Nothing reads them again by itself.
   */
  public final List<String> files;
  /** The generation of the cache. */
  public final long generation;
  /** The names of the release's adapters that were exchanged in the commit. */
  public final List<String> adapters;
  /**
   * The adapters that do not fit the newer foundation, by their paths: loaded ones, which keep it from being taken. And
   * those of {@link Runners}, by their names: each of their requests fails from now on.
   */
  public final List<String> unfit;

  Followed(
      String version,
      String sha256,
      boolean taken,
      String[] keys,
      String[] reasons,
      String[] files,
      long generation,
      String[] adapters,
      String[] unfit) {
    this.version = version;
    this.sha256 = sha256;
    this.taken = taken;
    this.keys = List.of(keys);
    this.reasons = List.of(reasons);
    this.files = List.of(files);
    this.generation = generation;
    this.adapters = List.of(adapters);
    this.unfit = List.of(unfit);
  }
}
