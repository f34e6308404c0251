package dev.blobstore;

import java.util.List;
import java.util.Objects;
import java.util.function.DoubleSupplier;

/**
 * Training without gradients: an adapter on a cache is moved a little forth and back, and then against the difference of
 * the two losses. So a program that only serves can learn, quantized and delegated as it is.
 *
 * <pre>{@code
 * MeZO optimizer = MeZO.of(cache, 1e-4, 1e-3, 0);
 * optimizer.step(() -> loss.execute(tokens).tensor(0).floats()[0]);
 * }</pre>
 *
 * <p>Zeroth-order descent as in MeZO (Malladi et al., 2023, arXiv:2305.17333). A step commits each tensor three times, so
 * give it a cache that nobody else serves from: one on the same foundation with the same adapter. Directions depend on
 * nothing but the seed, the number of the step, and the names, and are equal in all languages.
 *
 * <p>Any thread may call any method at any time; steps take turns.
 */
public final class MeZO extends NativeObject {
  private MeZO(long pointer) {
    super(pointer);
  }

  /**
   * Holds the cache.
   *
   * @param lr the learning rate.
   * @param eps how far the tensors are moved, in both directions.
   * @param seed of the directions.
   * @param names the tensors to train, float32; none for all of them in the cache's own files, without those of its base.
   * @throws BlobStoreException Training: the options are impossible, or there is nothing to train. KeyNotFound.
   *     Unsupported: a tensor has another dtype, is in the base, or cannot be changed. Update: its blob does not contain
   *     it, because it was quantized, packed or combined.
   */
  public static MeZO of(BlobCache cache, double lr, double eps, long seed, String... names) {
    String[] wanted = names.clone();
    return new MeZO(cache.get(on -> Native.makeMezo(on, lr, eps, seed, wanted)));
  }

  /** The names of the tensors that are trained, sorted. */
  public List<String> names() {
    return List.of(get(Native::mezoNames));
  }

  /** How many steps were made. */
  public synchronized long steps() {
    return get(Native::mezoSteps);
  }

  /** Go on with an adapter that was saved after so many steps. */
  public synchronized void setSteps(long steps) {
    run(on -> Native.mezoSetSteps(on, steps));
  }

  /** Change the options from the next step on. @throws BlobStoreException.Training they are impossible. */
  public synchronized void setOptions(double lr, double eps, long seed) {
    run(on -> Native.mezoSetOptions(on, lr, eps, seed));
  }

  /**
   * Make one step.
   *
   * @param loss called twice, in this thread; it should compute the same each time.
   * @return the mean of the two losses.
   * @throws BlobStoreException NotFiniteLoss; Training: no loaded program that serves takes one of the tensors; as {@link
   *     LogicalTensors#update}. Or what {@code loss} throws. The tensors are as before the step.
   */
  public synchronized double step(DoubleSupplier loss) {
    Objects.requireNonNull(loss, "loss");
    return get(on -> Native.mezoStep(on, loss));
  }

  @Override
  String about() {
    return names().size() + " tensors, " + steps() + " steps";
  }
}
