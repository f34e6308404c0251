package dev.blobstore;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;

/** What happened through one {@link PackedStore} object in this process. Counted, never estimated. */
public final class PackedStats extends Value {
  /** Delegates whose weights were all in a file. */
  public final long hits;
  /** Files that were written. */
  public final long builds;
  /** Delegates that packed weights on the heap. */
  public final long fallbacks;
  /** Packed weights that updates wrote in place. */
  public final long written;
  /** Delegates that an update packed again. */
  public final long repacked;
  /** Files that were damaged. */
  public final long dropped;
  /** Bytes that were compared with digests. */
  public final long verifiedBytes;
  /** Size of the files that programs use now. */
  public final long mappedBytes;
  /** Why delegates fell back, and how often. */
  public final Map<String, Long> reasons;

  PackedStats(long[] values, String[] reasons, long[] counts) {
    hits = values[0];
    builds = values[1];
    fallbacks = values[2];
    written = values[3];
    repacked = values[4];
    dropped = values[5];
    verifiedBytes = values[6];
    mappedBytes = values[7];
    Map<String, Long> read = new LinkedHashMap<>();
    for (int i = 0; i < reasons.length; ++i) {
      read.put(reasons[i], counts[i]);
    }
    this.reasons = Collections.unmodifiableMap(read);
  }
}
