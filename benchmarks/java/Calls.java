import dev.blobstore.BlobCache;
import dev.blobstore.Method;
import dev.blobstore.Outputs;
import dev.blobstore.Program;
import dev.blobstore.Tensor;
import dev.blobstore.ValueInfo;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.FloatBuffer;
import java.util.Arrays;

/**
 * A process that loads "forward" and runs it, as {@code start ours - PROGRAM.pte} of ../cpp/start.cpp does: {@code Calls
 * new|given PROGRAM.pte}. The result is a new tensor, or in one that is given. For each line {@code run TIMES} on standard input it prints the seconds of these calls.
 */
final class Calls {
  private Calls() {}

  public static void main(String[] arguments) throws IOException {
    try (BlobCache cache = BlobCache.open();
        Program program = Program.load(arguments[1], cache);
        Method forward = program.loadMethod("forward")) {
      Object[] inputs = forward.inputs().stream().map(Calls::ones).toArray();
      Tensor[] results = arguments[0].equals("given") ? new Tensor[] {ones(forward.outputs().get(0))} : null;
      System.out.println("ready");
      BufferedReader orders = new BufferedReader(new InputStreamReader(System.in));
      for (String line; (line = orders.readLine()) != null; ) {
        System.out.println(seconds(forward, results, inputs, Integer.parseInt(line.split(" ")[1])));
      }
    }
  }

  private static Tensor ones(ValueInfo info) {
    Tensor made = Tensor.zeros(info.dtype(), info.sizes());
    FloatBuffer numbers = made.data().asFloatBuffer();
    float[] all = new float[numbers.capacity()];
    Arrays.fill(all, 1);
    numbers.put(all);
    return made;
  }

  private static double seconds(Method forward, Tensor[] results, Object[] inputs, int times) {
    long start = System.nanoTime();
    Outputs outputs = null;
    for (int i = 0; i < times; ++i) {
      outputs = forward.executeInto(results, inputs);
    }
    double seconds = (System.nanoTime() - start) / 1e9;
    if (outputs.tensor(0).elements() == 0) {
      throw new AssertionError("no result");
    }
    return seconds;
  }
}
