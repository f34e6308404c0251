package dev.blobstore;

/** Changes parameters by their gradients. {@link TrainingProgram#step} calls it; steps with one optimizer take turns. */
public abstract class Optimizer extends NativeObject {
  Optimizer(long pointer) {
    super(pointer);
  }
}
