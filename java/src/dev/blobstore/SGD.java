package dev.blobstore;

/** Stochastic gradient descent as in torch.optim.SGD. Keeps the momentum of each parameter by its name. */
public final class SGD extends Optimizer {
  private SGD(long pointer) {
    super(pointer);
  }

  /** With a learning rate and momentum, and nothing else. @throws BlobStoreException.Training they are impossible. */
  public static SGD of(double lr, double momentum) {
    return of(lr, momentum, 0, 0, false);
  }

  /**
   * With all options.
   *
   * @param nesterov needs momentum, and no dampening.
   * @throws BlobStoreException.Training the options are impossible.
   */
  public static SGD of(double lr, double momentum, double dampening, double weightDecay, boolean nesterov) {
    return new SGD(Native.makeSgd(lr, momentum, dampening, weightDecay, nesterov));
  }
}
