package dev.blobstore;

import java.util.List;
import java.util.OptionalDouble;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/**
 * Runners on one foundation, which answer requests, each with the adapter of the request. As many requests run at the same
 * time as there are runners; the others wait, in the order in which they were made.
 *
 * <pre>{@code
 * Runners runners = Runners.of(List.of(first, second), List.of(layer, otherLayer), OptionalDouble.empty());
 * runners.setAdapter("support", "support.ptd");
 * String answer = runners.generate("My invoice is wrong.", new Request().adapter("support").strength(0.8));
 * }</pre>
 *
 * <p>Any thread may call any method at any time. {@link #generate} runs on the thread that calls it, and blocks until the
 * answer is there; nothing else blocks. {@link #close} refuses requests that wait; those that run go on to their end.
 */
public final class Runners extends NativeObject {
  private final List<TextRunner> runners;

  private Runners(long pointer, List<TextRunner> runners) {
    super(pointer);
    this.runners = runners;
  }

  /**
   * Load all runners.
   *
   * @param runners from now on, only this object may use them.
   * @param caches one for each: layers with the tensors of an adapter, on one base. They may be closed afterwards.
   * @param programScale as for {@link Adapters#loadAll}.
   * @throws BlobStoreException Input: there is no runner, their number is not that of the caches, or two have the same
   *     cache. Adapter: the scale is not finite. Closed.
   */
  public static Runners of(
      List<? extends TextRunner> runners, List<BlobCache> caches, OptionalDouble programScale) {
    List<TextRunner> all = List.copyOf(runners);
    if (all.size() != caches.size()) {
      throw new BlobStoreException.Input("", all.size() + " runners and " + caches.size() + " caches were given", 0);
    }
    long[] leased = new long[all.size()];
    int count = 0;
    try {
      for (; count < leased.length; ++count) {
        leased[count] = caches.get(count).handle.lease();
      }
      Runners made =
          new Runners(Native.makeQueue(leased, programScale), all);
      for (int i = 0; i < leased.length; ++i) {
        long scope = Native.enterScope(leased[i]);
        try {
          all.get(i).load();
        } catch (RuntimeException | Error failed) {
          made.close();
          throw failed;
        } finally {
          Native.free(scope);
        }
      }
      return made;
    } finally {
      while (count > 0) {
        caches.get(--count).handle.release();
      }
    }
  }

  /**
   * Generate an answer.
   *
   * @param prompt not empty. In a conversation, what comes after its text.
   * @return the text of all tokens.
   * @throws BlobStoreException Input: the prompt is empty, or the conversation belongs to other runners. KeyNotFound: there
   *     is no such adapter. Adapter: the strength is not finite, or the adapter does not fit. Unsupported: this thread runs a
   *     request already. Closed: also if this is closed while the request waits. Or what the runner throws.
   */
  public String generate(String prompt, Request request) {
    @Nullable Conversation conversation = request.conversation;
    @Nullable Stop stop = request.stop;
    @Nullable Consumer<String> onToken = request.onToken;
    long turn =
        get(
            queue ->
                with(
                    conversation,
                    one ->
                        with(
                            stop,
                            two -> Native.queueBegin(queue, prompt, request.adapter, request.strength, one, two))));
    if (turn == 0) {
      return "";
    }
    try {
      TextRunner runner = runners.get((int) Native.turnRunner(turn));
      if (Native.turnResets(turn)) {
        runner.reset();
      }
      StringBuilder answer = new StringBuilder();
      String[] last = {""};
      runner.generate(
          Native.turnPrompt(turn),
          token -> {
            answer.append(token);
            last[0] = token;
            if (onToken != null) {
              onToken.accept(token);
            }
            if (Native.turnStopped(turn)) {
              runner.stop();
            }
          });
      String text = answer.toString();
      Native.turnFinish(turn, text, last[0]);
      return text;
    } finally {
      Native.free(turn);
    }
  }

  /**
   * Give an adapter a name, or a name another adapter. Requests that wait or run keep the one that they were made with.
   *
   * @throws BlobStoreException Input: the name is empty. FileAccess, InvalidFile, Integrity, Adapter, Layout, Update: the
   *     file cannot be used. Closed.
   */
  public void setAdapter(String name, String path) {
    run(queue -> Native.queueSetAdapter(queue, name, path));
  }

  /** Forget a name. @throws BlobStoreException KeyNotFound: there is no such adapter. Closed. */
  public void removeAdapter(String name) {
    run(queue -> Native.queueRemoveAdapter(queue, name));
  }

  /** The names of the adapters, in the order of the alphabet. */
  public List<String> adapters() {
    return List.of(get(Native::queueAdapters));
  }

  /** What happened so far. */
  public RunnersStats stats() {
    return new RunnersStats(get(Native::queueStats));
  }

  /** Refuse all further requests, also those that wait. Requests that run go on to their end. */
  @Override
  public void close() {
    if (!closed()) {
      try {
        run(Native::queueClose);
      } catch (BlobStoreException.Closed already) {
        return; // by another thread
      }
      super.close();
    }
  }
}
