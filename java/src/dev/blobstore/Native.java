package dev.blobstore;

import java.io.IOException;
import java.util.OptionalDouble;
import java.util.function.DoubleSupplier;
import org.jspecify.annotations.Nullable;

/**
 * The functions of libblobstore_jni, which are registered when it is loaded. Each long that stands for an object is a
 * share of which the caller holds a lease; 0 is none. Strings and arrays are read during the call only; arrays of objects
 * are the call's own, and keep the memory of the tensors in them.
 */
final class Native {
  static {
    try {
      System.loadLibrary("blobstore_jni");
    } catch (UnsatisfiedLinkError error) {
      throw new UnsatisfiedLinkError(
          error.getMessage()
              + ". "
              + System.mapLibraryName("blobstore_jni")
              + " must be in a folder of -Djava.library.path="
              + System.getProperty("java.library.path")
              + ", and ExecuTorch's libraries beside it or where the system looks; on Android the AAR brings it, for"
              + " 64-bit ABIs alone. The manual says how it is built: docs/java.md");
    }
    Runtime.getRuntime().addShutdownHook(new Thread(Native::endFirst, "blobstore-end"));
  }

  private Native() {}

  /** Give back a share. */
  static native void free(long object);

  /** Let the end of the process wait for methods that are being loaded or run. */
  static native void endFirst();

  // native/cache.cpp
  static native long openCache(String[] paths, int mode, long base, long packed);
  static native String cacheName(long cache);
  static native String[] cacheKeys(long cache);
  static native boolean cacheContains(long cache, String key);
  static native boolean cacheOwns(long cache, String key);
  static native Tensor cacheBlob(long cache, String key);
  static native long cacheGeneration(long cache);
  static native long cacheVersion(long cache, String key);
  static native long cacheUpdate(long cache, Named blobs);
  static native long cacheLoad(long cache, String path);
  static native long cacheRevert(long cache);
  static native long cacheRevertKeys(long cache, String[] keys);
  static native long cacheSave(long cache, String path, boolean dirtyOnly);
  static native String[] cacheDirty(long cache);
  static native void cacheCheckFiles(long cache);
  static native boolean cacheVerify(long cache);
  static native long[] cacheStats(long cache);
  static native long makeWorkingCopy(String[] paths, String target);

  // native/program.cpp
  static native long loadProgram(String path, long cache, long packed);
  static native String[] programMethods(long program);
  static native String[] programNeeds(long program, String method);
  static native String[] programBackends(long program, String method);
  static native ValueInfo[] programInputs(long program, String method);
  static native ValueInfo[] programOutputs(long program, String method);
  static native String programPackedCachePath(long program);
  static native long loadMethod(long program, String name);
  static native String methodName(long method);
  static native ValueInfo[] methodInputs(long method);
  static native ValueInfo[] methodOutputs(long method);
  static native Object[] execute(long method, Object[] inputs, Tensor[] into);

  // native/tensors.cpp
  static native long openTensors(long cache);
  static native String[] tensorNames(long tensors);
  static native boolean tensorContains(long tensors, String name);
  static native LogicalTensor tensorAt(long tensors, String name);
  static native Tensor tensorValue(long tensors, String name);
  static native long tensorUpdate(long tensors, Named values, boolean finite);
  static native long tensorUpdateStateDict(long tensors, Named values, boolean strict, boolean finite);
  static native long tensorUpdateFile(long tensors, String path, boolean strict, boolean finite);

  // native/adapters.cpp
  static native String foundationFingerprint(String[] paths);
  static native AdapterInfo readAdapter(String path);
  static native long saveAdapter(String path, Named tensors, String[] foundation, double scale);
  static native long loadAdapter(long tensors, String path, OptionalDouble scale, double strength);
  static native long setAdapterStrength(long tensors, double strength);
  static native long loadAdapters(long tensors, String[] paths, double[] strengths, OptionalDouble scale);
  static native long setAdapterStrengths(long tensors, double[] strengths);
  static native long mergeAdapter(long tensors, String path, double alpha);
  static native String[] mergedWeights(long merged);
  static native long mergedGeneration(long merged);
  static native boolean mergedUndone(long merged);
  static native long mergedUndo(long merged);

  // native/packed.cpp
  static native long openPacked(String folder, long limit, boolean verify, long readAhead);
  static native PackedStats packedStats(long store);
  static native PackedFile[] packedList(long store);
  static native PackedFile[] packedVerify(long store);
  static native PackedFile[] packedGc(long store);

  // native/releases.cpp
  static native Missing missing(String index, String directory, ReleaseOptions options);
  static native InstalledRelease commit(String index, String directory, ReleaseOptions options);
  static native InstalledRelease pull(
      String url, String directory, ReleaseOptions options, Releases.Download download) throws IOException;
  static native long openRelease(String directory, String @Nullable [] data, long packed, String executorch);
  static native long releaseCache(long release);
  /** Its name, version, digest and path. */
  static native String[] releaseFacts(long release);
  static native InstalledFile[] releaseFiles(long release);
  static native Followed followRelease(long release, int adapters);
  static native long[] gc(String directory, long keep);

  // native/training.cpp
  static native long makeSgd(double lr, double momentum, double dampening, double weightDecay, boolean nesterov);
  static native long makeAdamW(
      double lr, double beta1, double beta2, double eps, double weightDecay, boolean amsgrad);
  static native long loadTraining(long program, String method);
  static native String[] trainingNames(long training);
  static native Tensor trainingParameter(long training, String name);
  static native void trainingSetParameter(long training, String name, Tensor value);
  static native Object[] trainingStep(long training, long optimizer, Object[] inputs, int onNan);
  static native long trainingSave(long training, long optimizer, String path, String[] base);
  static native void trainingLoad(long training, long optimizer, String path, String[] base);
  static native long trainingPublish(long training, long tensors, boolean strict, boolean finite);
  static native long makeMezo(long cache, double lr, double eps, long seed, String[] names);
  static native String[] mezoNames(long mezo);
  static native long mezoSteps(long mezo);
  static native void mezoSetSteps(long mezo, long steps);
  static native void mezoSetOptions(long mezo, double lr, double eps, long seed);
  static native double mezoStep(long mezo, DoubleSupplier loss);

  // native/requests.cpp
  static native long makeQueue(long[] caches, OptionalDouble scale);
  static native void queueSetAdapter(long queue, String name, String path);
  static native void queueRemoveAdapter(long queue, String name);
  static native String[] queueAdapters(long queue);
  static native long[] queueStats(long queue);
  static native void queueClose(long queue);
  static native long queueBegin(
      long queue, String prompt, String adapter, double strength, long conversation, long stop);
  static native long turnRunner(long turn);
  static native boolean turnResets(long turn);
  static native String turnPrompt(long turn);
  static native boolean turnStopped(long turn);
  static native void turnFinish(long turn, String answer, String last);
  static native long enterScope(long cache);
  static native long makeConversation(String text);
  static native String conversationText(long conversation);
  static native long makeStop();
  static native void setStop(long stop);
  static native boolean isStopSet(long stop);
}
