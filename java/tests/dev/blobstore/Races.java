package dev.blobstore;

import static dev.blobstore.Harness.check;
import static dev.blobstore.Harness.end;
import static dev.blobstore.Harness.require;
import static dev.blobstore.Harness.same;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.atomic.AtomicLong;

/**
 * {@code Races FOLDER SECONDS}: threads that use, change and close the same objects. Every result must belong to one
 * generation, and nothing but {@link BlobStoreException.Closed} may be thrown.
 */
final class Races {
  private static final float[] POINTS = {0, 0, 0, 1, 1, 0, 1, 1};

  private final String folder;
  private final long nanoseconds;
  private final ConcurrentLinkedQueue<Throwable> errors = new ConcurrentLinkedQueue<>();

  private Races(String folder, double seconds) {
    this.folder = folder + "/programs/";
    this.nanoseconds = (long) (seconds * 1e9);
  }

  public static void main(String[] arguments) {
    Races all = new Races(arguments[0], Double.parseDouble(arguments[1]));
    check("updates", all::updates);
    check("closing", all::closing);
    check("one optimizer", all::oneOptimizer);
    end();
  }

  private interface Work {
    void once() throws Exception;
  }

  /** Repeat each of these in a thread of its own. */
  private void together(Work... all) throws Exception {
    long until = System.nanoTime() + nanoseconds;
    CyclicBarrier start = new CyclicBarrier(all.length);
    List<Thread> threads = new ArrayList<>();
    for (Work work : all) {
      Thread thread =
          new Thread(
              () -> {
                try {
                  start.await();
                  do {
                    work.once();
                  } while (System.nanoTime() < until && errors.isEmpty());
                } catch (Throwable error) {
                  errors.add(error);
                }
              });
      threads.add(thread);
      thread.start();
    }
    for (Thread thread : threads) {
      thread.join();
    }
    if (!errors.isEmpty()) {
      throw new AssertionError("in a thread", errors.peek());
    }
  }

  private static Tensor points() {
    return Tensor.of(POINTS, 4, 2);
  }

  /** Two methods of two programs, two threads in each, while two threads update and revert. */
  private void updates() throws Exception {
    try (BlobCache cache = BlobCache.open(folder + "xor.ptd");
        LogicalTensors tensors = LogicalTensors.of(cache);
        Program one = Program.load(folder + "serve.pte", cache);
        Program other = Program.load(folder + "serve.pte", cache);
        Method first = one.loadMethod("forward");
        Method second = other.loadMethod("forward")) {
      Map<String, Tensor> changed =
          Map.of("hidden.weight", Tensor.zeros(DType.FLOAT32, 10, 2), "out.bias", Tensor.zeros(DType.FLOAT32, 2));
      float[] before = first.execute(points()).tensor(0).floats();
      tensors.update(changed);
      float[] after = first.execute(points()).tensor(0).floats();
      require(!Arrays.equals(before, after), "the update is seen");
      AtomicLong old = new AtomicLong();
      AtomicLong young = new AtomicLong();
      Tensor shared = points();
      Work run = () -> see(first.execute(shared), before, after, old, young);
      Work runOther = () -> see(second.execute(points()), before, after, old, young);
      Work change =
          () -> {
            tensors.update(changed);
            cache.revert();
          };
      Work read =
          () -> {
            float bias = tensors.value("out.bias").floats()[0];
            require(bias == 0 || Float.isFinite(bias), "a value");
            cache.stats();
          };
      together(run, run, runOther, runOther, change, change, read);
      require(old.get() > 0 && young.get() > 0, "both were seen: " + old + " and " + young);
    }
  }

  private static void see(Outputs outputs, float[] before, float[] after, AtomicLong old, AtomicLong young) {
    float[] found = outputs.tensor(0).floats();
    if (Arrays.equals(found, before)) {
      old.incrementAndGet();
    } else if (Arrays.equals(found, after)) {
      young.incrementAndGet();
    } else {
      throw new AssertionError("of no generation: " + Arrays.toString(found));
    }
  }

  /** Everything that is open, which one thread closes and replaces while others use it. */
  private static final class Opened {
    final BlobCache cache;
    final LogicalTensors tensors;
    final Program program;
    final Method method;

    Opened(String folder) {
      cache = BlobCache.open(folder + "xor.ptd");
      tensors = LogicalTensors.of(cache);
      program = Program.load(folder + "serve.pte", cache);
      method = program.loadMethod("forward");
    }

    void close() {
      method.close();
      tensors.close();
      program.close();
      cache.close();
    }
  }

  private volatile Opened now;

  private void closing() throws Exception {
    now = new Opened(folder);
    float[] expected = now.method.execute(points()).tensor(0).floats();
    AtomicLong done = new AtomicLong();
    AtomicLong refused = new AtomicLong();
    Work run =
        unlessClosed(
            () -> {
              require(Arrays.equals(now.method.execute(points()).tensor(0).floats(), expected), "the result");
              done.incrementAndGet();
            },
            refused);
    Work load =
        unlessClosed(
            () -> {
              try (Method another = now.program.loadMethod("forward")) {
                require(Arrays.equals(another.execute(points()).tensor(0).floats(), expected), "the result");
              }
            },
            refused);
    Work look =
        unlessClosed(
            () -> {
              Opened seen = now;
              same(seen.tensors.value("out.bias").elements(), 2);
              same(seen.cache.keys().isEmpty(), false);
              seen.cache.update(Map.of());
            },
            refused);
    Work replace =
        () -> {
          Opened old = now;
          now = new Opened(folder);
          Thread twice = new Thread(old::close); // two threads close at the same time
          twice.start();
          old.close();
          twice.join();
        };
    together(run, run, load, look, replace);
    now.close();
    require(done.get() > 0 && refused.get() > 0, "calls that ran, and that were refused: " + done + ", " + refused);
    same(Handle.open(), 0);
  }

  private static Work unlessClosed(Work work, AtomicLong refused) {
    return () -> {
      try {
        work.once();
      } catch (BlobStoreException.Closed error) {
        refused.incrementAndGet();
      }
    };
  }

  /** Two training programs with one optimizer, which is for one thread at a time. */
  private void oneOptimizer() throws Exception {
    try (BlobCache cache = BlobCache.open(folder + "xor.ptd");
        Program program = Program.load(folder + "train.pte", cache);
        TrainingProgram one = TrainingProgram.load(program, "forward");
        TrainingProgram other = TrainingProgram.load(program, "forward");
        LogicalTensors tensors = LogicalTensors.of(cache);
        SGD sgd = SGD.of(0.01, 0.9)) {
      Tensor labels = Tensor.of(new long[] {0, 1, 1, 0}, 4);
      together(
          () -> one.step(sgd, points(), labels),
          () -> other.step(sgd, points(), labels),
          () -> one.publish(tensors, true, true),
          () -> same(one.parameter("hidden.weight").elements(), 20));
    }
  }
}
