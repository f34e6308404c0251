package dev.blobstore;

import java.util.function.Consumer;

/** A runner over a method: letters and digits are tokens, and the likeliest comes next. */
public class LetterRunner implements TextRunner {
  private static final String LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

  private final Method forward;
  private final int count;
  private long position = 0;
  private boolean stopped = false;
  private boolean loaded = false;

  /** Generates this many tokens. The method stays open. */
  public LetterRunner(Method forward, int count) {
    this.forward = forward;
    this.count = count;
  }

  /** The tokens of a text. */
  public static long[] encode(String text) {
    return text.chars().mapToLong(LETTERS::indexOf).toArray();
  }

  boolean isLoaded() {
    return loaded;
  }

  @Override
  public void load() {
    loaded = true;
  }

  @Override
  public void reset() {
    position = 0;
  }

  @Override
  public void stop() {
    stopped = true;
  }

  @Override
  public void generate(String prompt, Consumer<String> onToken) {
    stopped = false;
    long[] tokens = encode(prompt);
    for (int made = 0; made < count && !stopped; ++made) {
      Tensor read = Tensor.of(tokens, 1, tokens.length);
      float[] logits = forward.execute(read, Tensor.of(new long[] {position}, 1)).tensor(0).floats();
      position += tokens.length;
      int begin = logits.length - LETTERS.length();
      int best = 0;
      for (int i = 1; i < LETTERS.length(); ++i) {
        best = logits[begin + i] > logits[begin + best] ? i : best;
      }
      tokens = new long[] {best};
      onToken.accept(LETTERS.substring(best, best + 1));
    }
  }
}
