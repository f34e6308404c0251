package dev.blobstore;

import java.util.List;
import org.jspecify.annotations.Nullable;

/**
 * A {@code .pte} bound to a cache, which it holds. Any thread may call any method at any time; {@link #loadMethod} waits
 * while a commit to the cache changes bytes, nothing else waits.
 */
public final class Program extends NativeObject {
  private Program(long pointer) {
    super(pointer);
  }

  /** As {@link #load(String, BlobCache, PackedStore)}, with the packed store of the cache, if it has one. */
  public static Program load(String path, BlobCache cache) {
    return load(path, cache, null);
  }

  /**
   * Read a program and check that the cache has all tensors that the program takes from data files.
   *
   * @param cache {@code BlobCache.open()} for a program without data files.
   * @param packed where packed weights are kept. Null takes that of the cache.
   * @throws BlobStoreException FileAccess, InvalidFile, KeyNotFound, Layout, Program; Closed: cache or packed.
   */
  public static Program load(String path, BlobCache cache, @Nullable PackedStore packed) {
    return new Program(cache.get(on -> with(packed, p -> Native.loadProgram(path, on, p))));
  }

  /** The names of its methods. */
  public List<String> methods() {
    return List.of(get(Native::programMethods));
  }

  /** Keys of the tensors that a method takes from data files. @throws BlobStoreException.MethodNotFound if unknown. */
  public List<String> needs(String method) {
    return List.of(get(program -> Native.programNeeds(program, method)));
  }

  /** The backends that parts of a method are delegated to. @throws BlobStoreException.MethodNotFound if unknown. */
  public List<String> backends(String method) {
    return List.of(get(program -> Native.programBackends(program, method)));
  }

  /** The inputs of a method, without loading it. @throws BlobStoreException.MethodNotFound if unknown. */
  public List<ValueInfo> inputs(String method) {
    return List.of(get(program -> Native.programInputs(program, method)));
  }

  /** The outputs of a method, without loading it. @throws BlobStoreException.MethodNotFound if unknown. */
  public List<ValueInfo> outputs(String method) {
    return List.of(get(program -> Native.programOutputs(program, method)));
  }

  /** The file that ExecuTorch's own {@code packed_cache_path} takes; empty if no method has one. */
  public String packedCachePath() {
    return get(Native::programPackedCachePath);
  }

  /**
   * Load a method, which holds the program. Close it when it is not used any more: its memory is that of the activations
   * and of packed weights.
   *
   * @throws BlobStoreException MethodNotFound, MissingBackend, Program; KeyNotFound: a delegate's blob.
   */
  public Method loadMethod(String name) {
    return new Method(get(program -> Native.loadMethod(program, name)));
  }

  @Override
  String about() {
    return String.join(", ", methods());
  }
}
