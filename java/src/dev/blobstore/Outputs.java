package dev.blobstore;

import java.util.Arrays;
import org.jspecify.annotations.Nullable;

/**
 * What a call returned: tensors, numbers, bools, strings, or null for None and for lists, which cannot be returned. It
 * refers to no native object and needs no {@code close()}.
 */
public final class Outputs {
  private final @Nullable Object[] values;

  Outputs(@Nullable Object[] values) {
    this.values = values;
  }

  /** How many there are. */
  public int size() {
    return values.length;
  }

  /** A {@link Tensor}, {@link Long}, {@link Double}, {@link Boolean}, {@link String} or null. */
  public @Nullable Object get(int index) {
    return values[index];
  }

  /** The tensor at an index. @throws BlobStoreException.UnsupportedData it is something else. */
  public Tensor tensor(int index) {
    return as(Tensor.class, index);
  }

  /** The int at an index. @throws BlobStoreException.UnsupportedData it is something else. */
  public long integer(int index) {
    return as(Long.class, index);
  }

  /** The float at an index. @throws BlobStoreException.UnsupportedData it is something else. */
  public double real(int index) {
    return as(Double.class, index);
  }

  /** The bool at an index. @throws BlobStoreException.UnsupportedData it is something else. */
  public boolean bool(int index) {
    return as(Boolean.class, index);
  }

  /** The string at an index. @throws BlobStoreException.UnsupportedData it is something else. */
  public String text(int index) {
    return as(String.class, index);
  }

  @Override
  public String toString() {
    return "Outputs" + Arrays.toString(values);
  }

  private <T> T as(Class<T> wanted, int index) {
    Object value = values[index];
    if (!wanted.isInstance(value)) {
      String found = value == null ? "None" : value.getClass().getSimpleName();
      throw new BlobStoreException.UnsupportedData(
          "", "output " + index + " is " + found + ", not " + wanted.getSimpleName(), 0);
    }
    return wanted.cast(value);
  }
}
