package dev.blobstore;

import java.util.List;
import java.util.Map;

/**
 * The tensors of a model by their names in the model, and the blobs that store them. Holds the cache.
 *
 * <p>Making one reads all records of the files; keep it for as long as you update by name. Any thread may call any
 * method at any time. Updates wait as those of {@link BlobCache} do.
 */
public final class LogicalTensors extends NativeObject {
  private LogicalTensors(long pointer) {
    super(pointer);
  }

  /**
   * The tensors that the records in the files of a cache describe.
   *
   * @throws BlobStoreException InvalidFile: records are damaged. KeyConflict: two records contradict each other.
   */
  public static LogicalTensors of(BlobCache cache) {
    return new LogicalTensors(cache.get(Native::openTensors));
  }

  /** The names of the tensors, without aliases. */
  public List<String> names() {
    return List.of(get(Native::tensorNames));
  }

  /** Whether there is a tensor with this name or alias. */
  public boolean contains(String name) {
    return get(tensors -> Native.tensorContains(tensors, name));
  }

  /** What an update of a tensor must have. @throws BlobStoreException.KeyNotFound the message names similar ones. */
  public LogicalTensor at(String name) {
    return get(tensors -> Native.tensorAt(tensors, name));
  }

  /**
   * A copy of the current value of a tensor, from one generation, in its own shape.
   *
   * @throws BlobStoreException KeyNotFound; Update: its blob was quantized, packed or combined.
   */
  public Tensor value(String name) {
    return get(tensors -> Native.tensorValue(tensors, name));
  }

  /** As {@link #update(Map, boolean)}, and takes infinities and NaN. */
  public long update(Map<String, Tensor> values) {
    return update(values, false);
  }

  /**
   * Change tensors of the model by name, or blobs by key, in one commit: all or none. Each is given in the model's own
   * shape and dtype. The next call of each program uses them. The tensors are read during the call.
   *
   * @param finite refuse infinities and NaN.
   * @return the new generation.
   * @throws BlobStoreException KeyNotFound; Layout: another shape or dtype. Update: it cannot be changed, or not without
   *     others, or is not finite. After an error nothing was changed.
   */
  public long update(Map<String, Tensor> values, boolean finite) {
    Named named = new Named(values);
    return get(tensors -> Native.tensorUpdate(tensors, named, finite));
  }

  /**
   * Change everything in a model's state dict that the programs on the cache use, in one commit. Other entries, and the
   * programs' own state, are ignored.
   *
   * @param strict refuse if a tensor of the loaded programs is missing or cannot be changed, or if more than one in a
   *     thousand numbers of one would be clipped, because its scale is in the program.
   * @throws BlobStoreException as {@link #update(Map, boolean)}; Update: also if nothing can be updated.
   */
  public long updateStateDict(Map<String, Tensor> values, boolean strict, boolean finite) {
    Named named = new Named(values);
    return get(tensors -> Native.tensorUpdateStateDict(tensors, named, strict, finite));
  }

  /**
   * The same, with the tensors of a {@code .safetensors} or {@code .ptd} file, which are not copied to Java.
   *
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, UnsupportedData, also.
   */
  public long updateStateDict(String path, boolean strict, boolean finite) {
    return get(tensors -> Native.tensorUpdateFile(tensors, path, strict, finite));
  }

  @Override
  String about() {
    return names().size() + " tensors";
  }
}
