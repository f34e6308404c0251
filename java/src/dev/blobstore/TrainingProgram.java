package dev.blobstore;

import java.util.List;
import java.util.Objects;
import org.jspecify.annotations.Nullable;

/**
 * A method that computes a loss and its gradients. Trains its own copy of the parameters: neither the cache nor other
 * programs on it see a step before {@link #publish}.
 *
 * <p>Any thread may call any method at any time. Those that read or change the parameters take turns.
 */
public final class TrainingProgram extends NativeObject {
  /** What a step does if the loss is infinite or NaN; native code knows the order. */
  public enum OnNan {
    /** It throws {@link BlobStoreException.NotFiniteLoss}; nothing was changed. */
    THROW,
    /** It returns the outputs; nothing was changed. */
    SKIP,
    /** It steps as usual. */
    ACCEPT,
  }

  private TrainingProgram(long pointer) {
    super(pointer);
  }

  /**
   * Load a method for training. Holds the program and its cache.
   *
   * @throws BlobStoreException Program: the method is not a training program. Unsupported: gradients or parameters have
   *     no planned memory. As {@link Program#loadMethod}.
   */
  public static TrainingProgram load(Program program, String method) {
    return new TrainingProgram(program.get(from -> Native.loadTraining(from, method)));
  }

  /** The names of the trained parameters, in the order of the program. */
  public List<String> names() {
    return List.of(get(Native::trainingNames));
  }

  /** A copy of a trained parameter, from between two steps. @throws BlobStoreException.KeyNotFound none has the name. */
  public Tensor parameter(String name) {
    return get(training -> Native.trainingParameter(training, name));
  }

  /**
   * Change a trained parameter, between two steps: for example, to go on from an adapter. The tensor is copied.
   *
   * @throws BlobStoreException KeyNotFound: none has the name. Layout: it has another shape, dtype or order.
   */
  public void setParameter(String name, Tensor value) {
    Objects.requireNonNull(value, "value");
    run(training -> Native.trainingSetParameter(training, name, value));
  }

  /** As {@link #step(Optimizer, OnNan, Object...)}, and throws if the loss is not finite. */
  public Outputs step(Optimizer optimizer, @Nullable Object... inputs) {
    return step(optimizer, OnNan.THROW, inputs);
  }

  /**
   * Compute loss and gradients, and step the optimizer.
   *
   * @param inputs as {@link Method#execute} takes them.
   * @return the outputs of the model, the loss first.
   * @throws BlobStoreException NotFiniteLoss, Training; as {@link Method#execute}.
   */
  public Outputs step(Optimizer optimizer, OnNan onNan, @Nullable Object... inputs) {
    Objects.requireNonNull(optimizer, "optimizer");
    Object[] given = inputs.clone(); // no other thread exchanges them
    return new Outputs(call(optimizer, (training, by) -> Native.trainingStep(training, by, given, onNan.ordinal())));
  }

  /**
   * Write a checkpoint: parameters and buffers by name, and the optimizer's state. The files are those of Python and C++.
   *
   * @param optimizer whose state to save; null for none.
   * @param base data files; what they have with the same bytes is not written again.
   * @return the size of the file in bytes.
   * @throws BlobStoreException OutputPath, Unsupported, FileAccess, InvalidFile, Integrity. An existing file is unchanged.
   */
  public long save(String path, @Nullable Optimizer optimizer, String... base) {
    String[] files = base.clone();
    return call(optimizer, (training, by) -> Native.trainingSave(training, by, path, files));
  }

  /**
   * Continue from a checkpoint, in the parameters, the buffers and the optimizer with its options.
   *
   * @param optimizer of the class that was saved; null for none.
   * @param base as for {@link #save}.
   * @throws BlobStoreException FileAccess, InvalidFile, Integrity, Checkpoint, Unsupported. Nothing was changed.
   */
  public void restore(String path, @Nullable Optimizer optimizer, String... base) {
    String[] files = base.clone();
    call(
        optimizer,
        (training, by) -> {
          Native.trainingLoad(training, by, path, files);
          return null;
        });
  }

  private interface Call<T> {
    T on(long training, long optimizer);
  }

  private <T> T call(@Nullable Optimizer optimizer, Call<T> call) {
    return get(
        training ->
            with(
                optimizer,
                by -> {
                  synchronized (optimizer == null ? this : optimizer) { // one is for one thread at a time
                    return call.on(training, by);
                  }
                }));
  }

  /**
   * Commit the trained parameters to the programs on a cache, all or none. Their next call uses them.
   *
   * @param strict refuse if the cache lacks parameters or has them under names that no program takes which serves, if a
   *     program on it has some where no update reaches them, or if a strict {@link LogicalTensors#updateStateDict} would
   *     refuse to clip some.
   * @param finite refuse infinities and NaN.
   * @return the cache's new generation.
   * @throws BlobStoreException KeyNotFound, Update, and as {@link LogicalTensors#update}. Nothing was changed.
   */
  public long publish(LogicalTensors target, boolean strict, boolean finite) {
    Objects.requireNonNull(target, "target");
    return get(from -> target.get(to -> Native.trainingPublish(from, to, strict, finite)));
  }

  @Override
  String about() {
    return names().size() + " parameters";
  }
}
