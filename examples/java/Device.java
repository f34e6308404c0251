import dev.blobstore.Adapters;
import dev.blobstore.BlobCache;
import dev.blobstore.BlobStoreException;
import dev.blobstore.LogicalTensors;
import dev.blobstore.Method;
import dev.blobstore.Program;
import dev.blobstore.SGD;
import dev.blobstore.Tensor;
import dev.blobstore.TrainingProgram;
import java.util.List;
import java.util.Map;
import java.util.Random;

/**
 * The life of weights on a device, in Java: open a foundation and an adapter, run, change a tensor by its name, exchange
 * the adapter, train, publish, save what changed, and start again from it. {@code Device FOLDER}, with the files that
 * ../cpp/prepare.py wrote; writes trained-java.ptd there.
 */
final class Device {
  private static final int BATCH = 16; // that train.pte was exported for

  private interface Task {
    boolean isFirst(float x, float y); // of the two classes
  }

  private static final Task LEFT = (x, y) -> x < 0;
  private static final Task UP = (x, y) -> y > 0;
  private static final Task CORNER = (x, y) -> x < 0 && y > 0;

  private Device() {}

  /** Print how many of 1,000 random points a program classifies as the task does. */
  private static int score(String when, Method serve, Task task) {
    Random random = new Random(1);
    int right = 0;
    for (int i = 0; i < 1000; ++i) {
      float[] point = {2 * random.nextFloat() - 1, 2 * random.nextFloat() - 1};
      float[] scores = serve.execute(Tensor.of(point, 1, 2)).tensor(0).floats();
      right += (scores[1] > scores[0]) == task.isFirst(point[0], point[1]) ? 1 : 0;
    }
    System.out.printf("%-38s %4d of 1000%n", when, right);
    return right;
  }

  /** Take steps on random points. */
  private static void train(TrainingProgram training, Task task, int steps) {
    Random random = new Random(2);
    try (SGD optimizer = SGD.of(0.02, 0.9)) {
      for (int step = 0; step < steps; ++step) {
        float[] points = new float[2 * BATCH];
        long[] labels = new long[BATCH];
        for (int i = 0; i < BATCH; ++i) {
          points[2 * i] = 2 * random.nextFloat() - 1;
          points[2 * i + 1] = 2 * random.nextFloat() - 1;
          labels[i] = task.isFirst(points[2 * i], points[2 * i + 1]) ? 1 : 0;
        }
        training.step(optimizer, Tensor.of(points, BATCH, 2), Tensor.of(labels, BATCH));
      }
    }
  }

  private static BlobCache adapterOn(BlobCache foundation, String folder) {
    return BlobCache.open(List.of(folder + "/adapter.ptd"), BlobCache.Mode.PRIVATE, foundation, null);
  }

  private static void live(String folder) {
    // The foundation's pages are shared by all processes, the adapter lies on top.
    try (BlobCache foundation = BlobCache.open(folder + "/foundation.ptd");
        BlobCache cache = adapterOn(foundation, folder);
        Program program = Program.load(folder + "/serve.pte", cache);
        Method serve = program.loadMethod("forward");
        LogicalTensors tensors = LogicalTensors.of(cache)) { // the tensors of the model by name
      Adapters.load(tensors, folder + "/left.ptd");
      score("adapter left.ptd", serve, LEFT);

      tensors.update(Map.of("head.bias", Tensor.of(new float[] {100, 0}, 2)));
      score("head.bias changed", serve, LEFT);

      Adapters.load(tensors, folder + "/up.ptd"); // the whole adapter, so head.bias too
      score("adapter up.ptd", serve, UP);

      try (Program train = Program.load(folder + "/train.pte", cache); // goes on from up.ptd
          TrainingProgram training = TrainingProgram.load(train, "forward")) {
        train(training, CORNER, 200);
        score("trained, not published", serve, CORNER);
        training.publish(tensors, true, true);
      }
      int published = score("published", serve, CORNER);
      cache.save(folder + "/trained-java.ptd", true);
      cache.revert();
      score("reverted", serve, CORNER);

      // The next start of the application.
      try (BlobCache again = adapterOn(foundation, folder);
          Program other = Program.load(folder + "/serve.pte", again);
          Method restarted = other.loadMethod("forward")) {
        again.load(folder + "/trained-java.ptd");
        if (score("started again from trained-java.ptd", restarted, CORNER) != published) {
          throw new IllegalStateException("the restarted program computes something else");
        }
      }
    }
  }

  public static void main(String[] arguments) {
    try {
      live(arguments[0]);
    } catch (BlobStoreException error) {
      System.err.println("device: " + error.getMessage());
      System.exit(1);
    }
  }
}
