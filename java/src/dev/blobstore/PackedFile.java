package dev.blobstore;

/** A file of a packed store. */
public final class PackedFile extends Value {
  /** Where it is. */
  public final String path;
  /** Its size in bytes. */
  public final long size;
  /** The packed weights in it. */
  public final long entries;
  /** Of those, the ones that updates write in place. */
  public final long mapped;
  /** When a load last used it, in seconds since 1970. */
  public final long used;
  /** Whether a living process uses it; known on Linux only. */
  public final boolean inUse;
  /** Why it cannot be used; empty if it can. */
  public final String problem;

  PackedFile(String path, long size, long entries, long mapped, long used, boolean inUse, String problem) {
    this.path = path;
    this.size = size;
    this.entries = entries;
    this.mapped = mapped;
    this.used = used;
    this.inUse = inUse;
    this.problem = problem;
  }
}
