package dev.blobstore;

import java.util.Arrays;
import java.util.Locale;
import org.jspecify.annotations.Nullable;

/** An input or output of a method. */
public final class ValueInfo {
  /** What values can be; native code knows the order. */
  public enum Kind {
    NONE,
    TENSOR,
    INT,
    FLOAT,
    BOOL,
    STRING,
    OTHER,
  }

  private final Kind kind;
  private final int type;
  private final int[] sizes;
  private final int[] order;
  private final String name;

  ValueInfo(int kind, int type, int[] sizes, int[] order, String name) {
    this.kind = Kind.values()[kind];
    this.type = type;
    this.sizes = sizes;
    this.order = order;
    this.name = name;
  }

  /** What it is. */
  public Kind kind() {
    return kind;
  }

  /** The element type of a tensor; null for anything else. */
  public @Nullable DType dtype() {
    return kind == Kind.TENSOR ? DType.of(type) : null;
  }

  /** The sizes of a tensor, the largest that it can have; a new array. */
  public long[] sizes() {
    return Arrays.stream(sizes).asLongStream().toArray();
  }

  /** The dimensions of a tensor from outermost to innermost in memory; a new array. */
  public int[] dimOrder() {
    return order.clone();
  }

  /** The name of an input; empty if the program does not record it, and for outputs. */
  public String name() {
    return name;
  }

  @Override
  public String toString() {
    String what = kind == Kind.TENSOR ? Tensor.describe(dtype(), sizes) : kind.name().toLowerCase(Locale.ROOT);
    return name.isEmpty() ? what : name + ": " + what;
  }
}
