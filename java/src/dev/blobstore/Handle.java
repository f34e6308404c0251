package dev.blobstore;

import java.lang.ref.PhantomReference;
import java.lang.ref.ReferenceQueue;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * The share that a Java object has in a native one, counted: calls take a lease of it. It is given back once, when the
 * object is closed and no call has a lease, or when the object was collected without being closed.
 */
final class Handle extends PhantomReference<NativeObject> {
  private static final int CLOSED = Integer.MIN_VALUE;
  private static final ReferenceQueue<NativeObject> COLLECTED = new ReferenceQueue<>();
  private static final Set<Handle> OPEN = ConcurrentHashMap.newKeySet(); // references must be reachable themselves

  private final long pointer;
  private final String name;
  private final AtomicInteger leases = new AtomicInteger(); // and the bit CLOSED

  Handle(NativeObject owner, long pointer) {
    super(owner, COLLECTED);
    this.pointer = pointer;
    this.name = owner.getClass().getSimpleName();
    OPEN.add(this);
    for (Handle lost; (lost = (Handle) COLLECTED.poll()) != null; ) {
      lost.close();
    }
  }

  /** The native object, which stays until {@link #release}. */
  long lease() {
    for (; ; ) {
      int now = leases.get();
      if (now < 0) {
        throw new BlobStoreException.Closed("", "this " + name + " was closed", 0);
      }
      if (leases.compareAndSet(now, now + 1)) {
        return pointer;
      }
    }
  }

  void release() {
    if (leases.decrementAndGet() == CLOSED) {
      Native.free(pointer);
    }
  }

  void close() {
    for (; ; ) {
      int now = leases.get();
      if (now < 0) {
        return;
      }
      if (leases.compareAndSet(now, now | CLOSED)) {
        OPEN.remove(this);
        clear();
        if (now == 0) {
          Native.free(pointer);
        }
        return;
      }
    }
  }

  boolean closed() {
    return leases.get() < 0;
  }

  /** How many objects of this process are open. */
  static int open() {
    return OPEN.size();
  }
}
