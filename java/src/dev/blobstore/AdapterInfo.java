package dev.blobstore;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalDouble;
import org.jspecify.annotations.Nullable;

/** What an adapter's file says. */
public final class AdapterInfo extends Value {
  /** The file. */
  public final String path;
  /** The fingerprint of the foundation that it was made for, if the file records it. */
  public final Optional<String> foundation;
  /** alpha / rank, if the file records it. */
  public final OptionalDouble scale;
  /** All other metadata of the file. */
  public final Map<String, String> metadata;
  /** The modules that it adapts. */
  public final List<String> modules;
  /** Everything that is wrong with its tensors; one with problems is not loaded. */
  public final List<String> problems;

  AdapterInfo(
      String path,
      @Nullable String foundation,
      OptionalDouble scale,
      String[] metadata,
      String[] modules,
      String[] problems) {
    this.path = path;
    this.foundation = Optional.ofNullable(foundation);
    this.scale = scale;
    Map<String, String> read = new LinkedHashMap<>();
    for (int i = 0; i < metadata.length; i += 2) {
      read.put(metadata[i], metadata[i + 1]);
    }
    this.metadata = Collections.unmodifiableMap(read);
    this.modules = List.of(modules);
    this.problems = List.of(problems);
  }
}
