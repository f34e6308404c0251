package dev.blobstore;

import java.util.List;

/** A tensor of a model, as updates take it. */
public final class LogicalTensor extends Value {
  /** Its fully qualified name. */
  public final String name;
  /** The type that an update must have. */
  public final DType dtype;
  /** Other names of the same tensor. */
  public final List<String> aliases;
  /** Keys of the blobs that an update of it may change: that store it, then of scales and biases beside them. */
  public final List<String> keys;
  /** Tensors that must be updated together with it, because one blob stores all of them. */
  public final List<String> needs;
  /** Why it cannot be changed; empty if it can. */
  public final String refusal;
  /** Whether a state dict may lack it: scales, buffers that are not persistent, and state. */
  public final boolean auxiliary;

  private final long[] sizes;

  LogicalTensor(
      String name,
      int type,
      long[] sizes,
      String[] aliases,
      String[] keys,
      String[] needs,
      String refusal,
      boolean auxiliary) {
    this.name = name;
    this.dtype = DType.of(type);
    this.sizes = sizes;
    this.aliases = List.of(aliases);
    this.keys = List.of(keys);
    this.needs = List.of(needs);
    this.refusal = refusal;
    this.auxiliary = auxiliary;
  }

  /** The sizes that an update must have; a new array. */
  public long[] sizes() {
    return sizes.clone();
  }
}
