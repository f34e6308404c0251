package dev.blobstore;

import java.io.Closeable;
import java.util.function.LongConsumer;
import java.util.function.LongFunction;
import org.jspecify.annotations.Nullable;

/**
 * An object that has a share in one of the C++ library.
 *
 * <p>{@code close()} gives the share back. It never waits: if another thread is in a call of this object, that call ends
 * as usual, and then the share is given back. Later calls throw {@link BlobStoreException.Closed}. Closing again does
 * nothing. What was made from the object keeps what it needs: a method runs on after its program and its cache were
 * closed. Memory is freed when the last holder is gone.
 *
 * <p>It is a {@link Closeable}, and so an {@link AutoCloseable}, because Kotlin's {@code use} takes every one of these.
 *
 * <p>An object that is collected without being closed is closed then, at a moment that nobody knows.
 */
abstract class NativeObject implements Closeable {
  final Handle handle;

  NativeObject(long pointer) {
    handle = new Handle(this, pointer);
  }

  /** Give back the share in the native object. Later calls throw {@link BlobStoreException.Closed}. */
  @Override
  public void close() {
    handle.close();
  }

  /** Whether {@link #close} was called. */
  public boolean closed() {
    return handle.closed();
  }

  /** What it is about, for {@link #toString}; may throw {@link BlobStoreException.Closed}. */
  String about() {
    return "";
  }

  /** The name of the class, and what it is about: for logs, so it may change. */
  @Override
  public final String toString() {
    String about;
    try {
      about = closed() ? "closed" : about();
    } catch (BlobStoreException.Closed meanwhile) {
      about = "closed";
    }
    return getClass().getSimpleName() + "(" + about + ")";
  }

  /** Call with the native object, which stays meanwhile. */
  final <T> T get(LongFunction<T> call) {
    long pointer = handle.lease();
    try {
      return call.apply(pointer);
    } finally {
      handle.release();
    }
  }

  final void run(LongConsumer call) {
    get(
        pointer -> {
          call.accept(pointer);
          return null;
        });
  }

  /** Call with an object that may be null, which is 0. */
  static <T> T with(@Nullable NativeObject object, LongFunction<T> call) {
    return object == null ? call.apply(0) : object.get(call);
  }
}
