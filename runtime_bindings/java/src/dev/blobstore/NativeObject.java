package dev.blobstore;

import java.io.Closeable;
import java.util.function.LongBinaryOperator;
import java.util.function.LongFunction;
import java.util.function.LongUnaryOperator;
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

  final <T> T get(LongFunction<T> call) {
    long pointer = handle.lease();
    try {
      return call.apply(pointer);
    } finally {
      handle.release();
    }
  }

  final long number(LongUnaryOperator call) {
    long pointer = handle.lease();
    try {
      return call.applyAsLong(pointer);
    } finally {
      handle.release();
    }
  }

  /** Call with two objects, each of which may be null, which is 0. */
  static long both(@Nullable NativeObject first, @Nullable NativeObject second, LongBinaryOperator call) {
    long one = first == null ? 0 : first.handle.lease();
    try {
      long two = second == null ? 0 : second.handle.lease();
      try {
        return call.applyAsLong(one, two);
      } finally {
        if (second != null) {
          second.handle.release();
        }
      }
    } finally {
      if (first != null) {
        first.handle.release();
      }
    }
  }
}
