package dev.blobstore;

import java.util.function.Consumer;

/**
 * What generates text for {@link Runners}: a few lines around ExecuTorch's {@code LlmModule}, or a runner of your own over a
 * {@link Method}. {@link Runners} calls it from one thread at a time.
 */
public interface TextRunner {
  /** Load the program. Called once. Delegates that ExecuTorch's own runtime loads in this call follow the runner's cache. */
  default void load() {}

  /** Forget all text: the next one begins. */
  void reset();

  /**
   * Read a text, after what was read and generated since the last {@link #reset}, and generate what follows. The last token
   * that is generated need not be read: it comes again at the begin of the next text.
   *
   * @param prompt not empty.
   * @param onToken to be called with the text of each token, but not with the prompt. What it throws must be passed on.
   */
  void generate(String prompt, Consumer<String> onToken);

  /** End the generation after this token. Called in {@code onToken}. */
  void stop();
}
