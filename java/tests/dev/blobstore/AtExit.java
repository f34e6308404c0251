package dev.blobstore;

import java.util.concurrent.CountDownLatch;

/** {@code AtExit FOLDER return|exit|halt}: the process ends while daemon threads are in calls. */
final class AtExit {
  private AtExit() {}

  public static void main(String[] arguments) throws InterruptedException {
    String folder = arguments[0] + "/programs/";
    BlobCache cache = BlobCache.open(folder + "packed.ptd");
    Program program = Program.load(folder + "packed.pte", cache);
    CountDownLatch running = new CountDownLatch(4);
    for (int i = 0; i < 4; ++i) {
      boolean loads = i % 2 == 0;
      Thread thread = new Thread(() -> repeat(program, loads, running));
      thread.setDaemon(true);
      thread.start();
    }
    running.await();
    Runtime.getRuntime().addShutdownHook(new Thread(cache::close)); // as applications do
    System.out.println("ending");
    if (arguments[1].equals("exit")) {
      System.exit(0);
    } else if (arguments[1].equals("halt")) {
      Runtime.getRuntime().halt(0);
    }
  }

  /** Run a method for ever, or load and run one again and again. */
  private static void repeat(Program program, boolean loads, CountDownLatch running) {
    Tensor ones = Tensor.zeros(DType.FLOAT32, 1, 300);
    while (true) {
      try (Method method = program.loadMethod("forward")) {
        do {
          method.execute(ones);
          running.countDown();
        } while (!loads);
      }
    }
  }
}
