package dev.blobstore;

import java.util.List;
import java.util.Locale;

/** A file of an installed release. */
public final class InstalledFile extends Value {
  /** What a file of a release is. */
  public enum Kind {
    PROGRAM,
    DATA,
    ADAPTER,
    OTHER,
  }

  /** Its path below {@link Release#path}. */
  public final String name;
  /** What it is. */
  public final Kind kind;
  /** Of a program: the names of the data files that it takes keys from. */
  public final List<String> data;

  InstalledFile(String name, String kind, String[] data) {
    this.name = name;
    this.kind = Kind.valueOf(kind.toUpperCase(Locale.ROOT));
    this.data = List.of(data);
  }
}
