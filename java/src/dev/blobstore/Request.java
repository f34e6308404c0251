package dev.blobstore;

import java.util.Objects;
import java.util.function.Consumer;
import org.jspecify.annotations.Nullable;

/** What a request runs with. Each method changes this object and returns it. For one thread at a time. */
public final class Request {
  String adapter = "";
  double strength = 1;
  @Nullable Conversation conversation = null;
  @Nullable Stop stop = null;
  @Nullable Consumer<String> onToken = null;

  /** The name of an adapter; without it, the foundation alone. */
  public Request adapter(String name) {
    adapter = Objects.requireNonNull(name);
    return this;
  }

  /** How much of the adapter: 1 is what it was trained for, 0 turns it off. */
  public Request strength(double value) {
    strength = value;
    return this;
  }

  /** What the prompt and the answer are added to; without it, the prompt is the whole text. */
  public Request conversation(Conversation value) {
    conversation = Objects.requireNonNull(value);
    return this;
  }

  /** What ends the request early. */
  public Request stop(Stop value) {
    stop = Objects.requireNonNull(value);
    return this;
  }

  /** Called for each token, on the thread of the request. What it throws ends the request. */
  public Request onToken(Consumer<String> value) {
    onToken = Objects.requireNonNull(value);
    return this;
  }
}
