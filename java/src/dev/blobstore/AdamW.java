package dev.blobstore;

/**
 * Adam with decoupled weight decay as in torch.optim.AdamW. Keeps two running averages of each parameter by its name,
 * three with amsgrad.
 */
public final class AdamW extends Optimizer {
  private AdamW(long pointer) {
    super(pointer);
  }

  /** With a learning rate and a weight decay, and torch's defaults. @throws BlobStoreException.Training they are impossible. */
  public static AdamW of(double lr, double weightDecay) {
    return of(lr, 0.9, 0.999, 1e-8, weightDecay, false);
  }

  /** With all options. @throws BlobStoreException.Training the options are impossible. */
  public static AdamW of(double lr, double beta1, double beta2, double eps, double weightDecay, boolean amsgrad) {
    return new AdamW(Native.makeAdamW(lr, beta1, beta2, eps, weightDecay, amsgrad));
  }
}
