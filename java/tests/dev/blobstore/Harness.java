package dev.blobstore;

import java.util.Arrays;
import java.util.Objects;

/** What the tests share. They print lines, of which tests/runtime/test_java.py compares numbers with torch's and numpy's. */
final class Harness {
  interface Check {
    void run() throws Exception;
  }

  private static int failures = 0;

  private Harness() {}

  /** Run a check, and say how it ended. */
  static void check(String name, Check check) {
    try {
      check.run();
      System.out.println("ok " + name);
    } catch (Throwable error) {
      ++failures;
      System.out.println("failed " + name + ": " + error);
      error.printStackTrace(System.out);
    }
  }

  static void end() {
    System.exit(failures == 0 ? 0 : 1);
  }

  static void require(boolean held, String what) {
    if (!held) {
      throw new AssertionError(what);
    }
  }

  static void same(Object found, Object wanted) {
    require(Objects.equals(found, wanted), "expected " + wanted + ", found " + found);
  }

  /** The error that a call throws, which must be of exactly this class and say all of this. */
  static <T extends Throwable> T fails(Class<T> wanted, Check call, String... parts) {
    try {
      call.run();
    } catch (Throwable error) {
      if (error.getClass() != wanted) {
        throw new AssertionError("expected " + wanted + ", found " + error, error);
      }
      for (String part : parts) {
        require(String.valueOf(error.getMessage()).contains(part), "'" + part + "' is not in: " + error.getMessage());
      }
      return wanted.cast(error);
    }
    throw new AssertionError("expected " + wanted + ", nothing was thrown");
  }

  /** Print numbers under a name. */
  static void print(String name, float[] numbers) {
    StringBuilder line = new StringBuilder("value " + name);
    for (float number : numbers) {
      line.append(' ').append(number);
    }
    System.out.println(line);
  }

  static void print(String name, Object... words) {
    System.out.println("value " + name + " " + String.join(" ", Arrays.stream(words).map(String::valueOf).toArray(String[]::new)));
  }
}
