package dev.blobstore;

import java.util.List;
import java.util.Map;
import java.util.OptionalDouble;

/**
 * LoRA adapters: small files beside a frozen foundation, exchanged, scaled and merged while programs run.
 *
 * <pre>{@code
 * Adapters.load(tensors, "german.ptd");     // the next call uses it
 * Adapters.setStrength(tensors, 0.5);       // half of it; 0 turns it off
 *
 * MergedAdapter merged = Adapters.merge(plain, "german.ptd", 1); // into the weights of a program without an adapter
 * merged.undo();                                                 // exactly the bytes from before
 * }</pre>
 *
 * <p>Where a path is taken, it may also be a folder that PEFT wrote, with {@code adapter_config.json} and {@code
 * adapter_model.safetensors}: it gets the names, ranks and scale of the programs. It does not record its foundation, so
 * only names and shapes are compared.
 *
 * <p>Any thread may call these at any time. They wait for each other on one cache, and as commits do. After an error
 * nothing was changed.
 */
public final class Adapters {
  private Adapters() {}

  /**
   * The fingerprint of a foundation, 32 hexadecimal digits.
   *
   * @param paths its {@code .ptd}, or several that are used together.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, KeyConflict; Adapter: a file is an adapter itself, or
   *     no file is given.
   */
  public static String fingerprint(List<String> paths) {
    return Native.foundationFingerprint(paths.toArray(new String[0]));
  }

  /**
   * Read an adapter's file, or a folder of PEFT.
   *
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity; Adapter: it is none, or cannot be honoured.
   */
  public static AdapterInfo read(String path) {
    return Native.readAdapter(path);
  }

  /**
   * Write an adapter, such as one that was trained here: its tensors by name, the fingerprint of its foundation, and its
   * scale. C++ and Python write the same file. An existing file is replaced when the new one is complete.
   *
   * @param tensors in the model's own shapes: a pair for each adapted module, and any other trained tensors.
   * @param foundation the {@code .ptd} that it was made for, or several that are used together.
   * @param scale the factor of the product of a pair: alpha / rank.
   * @return the size of the file in bytes.
   * @throws BlobStoreException Adapter: a pair is incomplete, there are none, or the scale is not finite. Layout, Update,
   *     UnsupportedData, InvalidKey: of a tensor. OutputPath, FileAccess, InvalidFile, Integrity. An existing file is
   *     unchanged.
   */
  public static long save(String path, Map<String, Tensor> tensors, List<String> foundation, double scale) {
    return Native.saveAdapter(path, new Named(tensors), foundation.toArray(new String[0]), scale);
  }

  /** As {@link #load(LogicalTensors, String, OptionalDouble, double)}, at strength 1 and the recorded scale. */
  public static long load(LogicalTensors tensors, String path) {
    return load(tensors, path, OptionalDouble.empty(), 1);
  }

  /**
   * Exchange the adapter that the programs on a cache run with, in one commit.
   *
   * @param tensors of a cache that already has the tensors of an adapter.
   * @param path an adapter that records its foundation, or a folder of PEFT.
   * @param programScale the factor that the program multiplies the product with, if the cache's files do not record it.
   * @param strength 1 is what it was trained for, 0 turns it off.
   * @return the new generation.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, DataChanged, KeyNotFound, Layout, Update; Adapter: it
   *     is for another foundation, incomplete, or of another scale.
   */
  public static long load(LogicalTensors tensors, String path, OptionalDouble programScale, double strength) {
    return tensors.get(on -> Native.loadAdapter(on, path, programScale, strength));
  }

  /**
   * Change how much of the adapter that {@link #load} loaded last is used, in one commit. Repeated changes add up no
   * rounding.
   *
   * @throws BlobStoreException Adapter: none was loaded, its tensors were changed since, or the strength is not finite.
   *     Update, FileAccess, Integrity.
   */
  public static long setStrength(LogicalTensors tensors, double strength) {
    return tensors.get(on -> Native.setAdapterStrength(on, strength));
  }

  /**
   * Run the programs on a cache with the sum of several adapters, in one commit.
   *
   * @param paths adapters that record their foundation; none at all computes what the foundation alone does.
   * @param strengths one for each.
   * @throws BlobStoreException as {@link #load}; Adapter: also if the ranks together exceed that of a program.
   */
  public static long loadAll(
      LogicalTensors tensors, List<String> paths, double[] strengths, OptionalDouble programScale) {
    String[] names = paths.toArray(new String[0]);
    double[] all = strengths.clone();
    return tensors.get(on -> Native.loadAdapters(on, names, all, programScale));
  }

  /**
   * Change how much of each adapter that {@link #loadAll} loaded last is used.
   *
   * @param strengths one for each, in the order of {@link #loadAll}.
   * @throws BlobStoreException as {@link #setStrength}; Adapter: also if their number differs.
   */
  public static long setStrengths(LogicalTensors tensors, double... strengths) {
    double[] all = strengths.clone();
    return tensors.get(on -> Native.setAdapterStrengths(on, all));
  }

  /**
   * Add an adapter to the weights of programs that have no adapter of their own, in one commit.
   *
   * @param alpha how much of it: 1 adds all of it, a negative number subtracts.
   * @return what undoes it; closing it does not.
   * @throws BlobStoreException as {@link #load}; Adapter: also if the model uses a weight in other places, too, such as an
   *     embedding that is tied to lm_head. Update: a weight is quantized or combined with others.
   */
  public static MergedAdapter merge(LogicalTensors tensors, String path, double alpha) {
    return new MergedAdapter(tensors.get(on -> Native.mergeAdapter(on, path, alpha)));
  }
}
