package dev.blobstore;

import static dev.blobstore.Harness.check;
import static dev.blobstore.Harness.end;
import static dev.blobstore.Harness.fails;
import static dev.blobstore.Harness.require;
import static dev.blobstore.Harness.same;

import java.util.ArrayList;
import java.util.List;
import java.util.OptionalDouble;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/**
 * {@code Requests FOLDER}, with the files that tests/llm/conftest.py writes. It prints a line for each text: the adapter,
 * its strength, the prompt and the answer, which tests/llm/test_runners_java.py compares with those of eager PyTorch.
 */
final class Requests {
  private static final int TOKENS = 12;

  private final String folder;

  private Requests(String folder) {
    this.folder = folder + "/";
  }

  public static void main(String[] arguments) {
    Requests all = new Requests(arguments[0]);
    check("texts", all::texts);
    check("at once", all::atOnce);
    check("conversation", all::conversation);
    check("stopping", all::stopping);
    check("refusals", all::refusals);
    check("closing", all::closing);
    same(Handle.open(), 0);
    end();
  }

  private Runners open(int count, List<AutoCloseable> kept) {
    List<LetterRunner> runners = new ArrayList<>();
    List<BlobCache> caches = new ArrayList<>();
    try (BlobCache foundation = BlobCache.open(folder + "live/foundation.ptd")) {
      for (int i = 0; i < count; ++i) {
        caches.add(BlobCache.open(List.of(folder + "live/model_lora.ptd"), BlobCache.Mode.PRIVATE, foundation, null));
        try (Program program = Program.load(folder + "live/model.pte", caches.get(i))) {
          Method forward = program.loadMethod("forward");
          kept.add(forward);
          runners.add(new LetterRunner(forward, TOKENS));
        }
      }
      Runners made = Runners.of(runners, caches, OptionalDouble.empty());
      require(runners.stream().allMatch(LetterRunner::isLoaded), "a runner was not loaded");
      made.setAdapter("one", folder + "one.ptd");
      made.setAdapter("two", folder + "two.ptd");
      return made;
    } finally {
      caches.forEach(BlobCache::close);
    }
  }

  private interface Use {
    void run(Runners runners) throws Exception;
  }

  private void with(int count, Use use) throws Exception {
    List<AutoCloseable> kept = new ArrayList<>();
    try (Runners runners = open(count, kept)) {
      use.run(runners);
    } finally {
      for (AutoCloseable one : kept) {
        one.close();
      }
    }
  }

  private static void print(String adapter, double strength, String prompt, String answer) {
    System.out.println("text " + (adapter.isEmpty() ? "-" : adapter) + " " + strength + " " + prompt + " " + answer);
  }

  private static Request with(String adapter) {
    return new Request().adapter(adapter);
  }

  private void texts() throws Exception {
    with(
        1,
        runners -> {
          same(runners.adapters(), List.of("one", "two"));
          StringBuilder heard = new StringBuilder();
          String first = runners.generate("once", with("one").onToken(heard::append));
          same(heard.toString(), first);
          print("one", 1, "once", first);
          for (double strength : new double[] {1, 0.5, 0}) {
            print("two", strength, "once", runners.generate("once", with("two").strength(strength)));
          }
          print("", 1, "once", runners.generate("once", new Request()));
          same(runners.stats().answered, 5L);
        });
  }

  private void atOnce() throws Exception {
    with(
        2,
        runners -> {
          ExecutorService users = Executors.newFixedThreadPool(4);
          List<Future<String>> answers = new ArrayList<>();
          String[] adapters = {"one", "two", ""};
          for (int i = 0; i < 9; ++i) {
            String prompt = "user" + i;
            String adapter = adapters[i % 3];
            answers.add(users.submit(() -> runners.generate(prompt, with(adapter))));
          }
          for (int i = 0; i < 9; ++i) {
            print(adapters[i % 3], 1, "user" + i, answers.get(i).get());
          }
          users.shutdown();
        });
  }

  private void conversation() throws Exception {
    with(
        1,
        runners -> {
          try (Conversation talk = new Conversation("so")) {
            String said = "so";
            for (String adapter : new String[] {"one", "one", "two"}) {
              String answer = runners.generate("hi", with(adapter).conversation(talk));
              print(adapter, 1, said + "hi", answer);
              said += "hi" + answer;
              same(talk.text(), said);
            }
            same(runners.stats().continued, 1L);
            fails(
                ArithmeticException.class,
                () ->
                    runners.generate(
                        "hi",
                        with("two").conversation(talk).onToken(token -> {
                          throw new ArithmeticException("mine");
                        })));
            same(talk.text(), said);
            print("two", 1, said + "x", runners.generate("x", with("two").conversation(talk)));
          }
        });
  }

  private void stopping() throws Exception {
    with(
        1,
        runners -> {
          try (Stop stop = new Stop()) {
            same(runners.generate("once", with("one").stop(stop).onToken(token -> stop.set())).length(), 1);
            require(stop.isSet(), "it is set");
            same(runners.generate("once", with("one").stop(stop)), "");
          }
        });
  }

  private void refusals() throws Exception {
    with(
        1,
        runners -> {
          fails(BlobStoreException.Input.class, () -> runners.generate("", new Request()), "the prompt is empty");
          fails(
              BlobStoreException.KeyNotFound.class, () -> runners.generate("x", with("nobody")), "'nobody'", "'one', 'two'");
          fails(
              BlobStoreException.Adapter.class,
              () -> runners.generate("x", with("one").strength(Double.NaN)),
              "not a finite number");
          fails(NullPointerException.class, () -> runners.generate(null, new Request()));
          fails(
              BlobStoreException.Unsupported.class,
              () -> runners.generate("x", with("one").onToken(token -> runners.generate("y", new Request()))),
              "this thread runs a request");
          fails(BlobStoreException.FileAccess.class, () -> runners.setAdapter("x", folder + "nothing.ptd"));
          fails(BlobStoreException.KeyNotFound.class, () -> runners.removeAdapter("x"), "'x'");
          fails(
              BlobStoreException.Input.class,
              () -> Runners.of(List.of(), List.of(), OptionalDouble.empty()),
              "there is no runner");
          print("one", 1, "once", runners.generate("once", with("one")));
        });
  }

  private void closing() throws Exception {
    with(
        1,
        runners -> {
          CountDownLatch begun = new CountDownLatch(1);
          CountDownLatch go = new CountDownLatch(1);
          ExecutorService users = Executors.newFixedThreadPool(2);
          Future<String> runs =
              users.submit(
                  () ->
                      runners.generate(
                          "hold",
                          with("two").onToken(token -> {
                            begun.countDown();
                            try {
                              go.await();
                            } catch (InterruptedException error) {
                              throw new IllegalStateException(error);
                            }
                          })));
          begun.await();
          Future<?> waits =
              users.submit(() -> fails(BlobStoreException.Closed.class, () -> runners.generate("x", with("one"))));
          while (runners.stats().waiting == 0) {
            Thread.onSpinWait();
          }
          runners.close();
          waits.get();
          go.countDown();
          print("two", 1, "hold", runs.get());
          fails(BlobStoreException.Closed.class, () -> runners.generate("x", with("one")));
          users.shutdown();
        });
  }
}
