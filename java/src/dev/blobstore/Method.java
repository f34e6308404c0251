package dev.blobstore;

import java.util.List;
import org.jspecify.annotations.Nullable;

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
  public Outputs execute(@Nullable Object... inputs) {
    return executeInto(null, inputs);
  }

  /**
   * As {@link #execute}, with results in tensors of the caller. For large results this saves new memory at each call,
   * which costs more than the copy.
   *
   * @param results for each result a tensor of its dtype, sizes and order of dimensions, or null for a new one; results
   *     beyond the end are new. No other call may use them at the same time.
   * @return the results, of which these tensors are some.
   * @throws BlobStoreException Layout: a tensor differs from its result; the method has run then. UnsupportedData: a
   *     tensor is read-only. And as {@link #execute}.
   */
  public Outputs executeInto(@Nullable Tensor @Nullable [] results, @Nullable Object... inputs) {
    Object[] given = inputs.clone(); // no other thread exchanges them
    @Nullable Tensor @Nullable [] into = results == null ? null : results.clone();
    for (int i = 0; into != null && i < into.length; ++i) {
      if (into[i] != null && into[i].data.isReadOnly()) {
        throw new BlobStoreException.UnsupportedData("", "the tensor for output " + i + " is read-only", 0);
      }
    }
    return new Outputs(get(method -> Native.execute(method, given, into)));
  }

  @Override
  String about() {
    return name() + ": " + inputs() + " to " + outputs();
  }
}
