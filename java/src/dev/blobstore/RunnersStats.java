package dev.blobstore;

/** Counts since the {@link Runners} were made, and of now. */
public final class RunnersStats extends Value {
  /** Requests that were finished, also early. */
  public final long answered;
  /** Requests that began and failed. */
  public final long failed;
  /** Exchanges of adapters and of strengths. */
  public final long exchanges;
  /** Requests that used the key/value cache of their conversation. */
  public final long continued;
  /** Requests that wait now. */
  public final long waiting;
  /** Requests that run now. */
  public final long running;

  RunnersStats(long[] values) {
    answered = values[0];
    failed = values[1];
    exchanges = values[2];
    continued = values[3];
    waiting = values[4];
    running = values[5];
  }
}
