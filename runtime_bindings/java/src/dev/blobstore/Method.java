package dev.blobstore;

import java.util.List;

/**
 * A method that is ready to run. Any thread may call it at any time: calls of one method take turns, other methods run
 * at the same time.
 */
public final class Method extends NativeObject {
  Method(long pointer) {
    super(pointer);
  }

  /** Its name. */
  public String name() {
    return get(Native::methodName);
  }

  /** Its inputs. */
  public List<ValueInfo> inputs() {
    return List.of(get(Native::methodInputs));
  }

  /** Its outputs. */
  public List<ValueInfo> outputs() {
    return List.of(get(Native::methodOutputs));
  }

  /**
   * Run the method. The whole call sees one generation of the cache. Waits while a commit changes bytes, and while
   * another thread is in this method.
   *
   * @param inputs for each input a {@link Tensor}, a {@link Long}, {@link Integer}, {@link Double}, {@link Float} or
   *     {@link Boolean}, or null for None. Tensors are read during the call and never written to.
   * @return the results, in memory of their own, which belongs to Java.
   * @throws BlobStoreException Input: the inputs do not fit. Execution: the method failed. UnsupportedData: an input is
   *     an object of another class, or a result is larger than a ByteBuffer can be.
   */
  public Outputs execute(Object... inputs) {
    long method = handle.lease();
    try {
      return new Outputs(Native.execute(method, inputs));
    } finally {
      handle.release();
    }
  }
}
