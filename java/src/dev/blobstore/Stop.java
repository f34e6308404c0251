package dev.blobstore;

/**
 * Ends a request early, from any thread. One that waits never begins, and its answer is empty; for one that runs, {@link
 * TextRunner#stop} is called at its next tokens, and its answer is what was generated so far. Stays set; may be given to
 * several requests.
 */
public final class Stop extends NativeObject {
  public Stop() {
    super(Native.makeStop());
  }

  /** End the requests that this was given to. */
  public void set() {
    run(Native::setStop);
  }

  /** Whether {@link #set} was called. */
  public boolean isSet() {
    return get(Native::isStopSet);
  }
}
