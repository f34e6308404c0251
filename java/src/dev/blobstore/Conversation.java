package dev.blobstore;

/**
 * A text that grows with each request: its prompt, then the answer. The next request goes on where the text ends.
 *
 * <p>A runner that has read the text keeps its key/value cache for it, and then reads only what is new. It reads the whole
 * text again if another request had the runner in between, if the request has another adapter or strength, or if any weight
 * was changed since. A request that fails leaves the text as it was. The requests of one conversation run one after another,
 * in their order. Any thread may use it at any time, with one {@link Runners}.
 */
public final class Conversation extends NativeObject {
  /** A conversation in which nothing was said. */
  public Conversation() {
    this("");
  }

  /** @param text what was said so far. The first request reads it. */
  public Conversation(String text) {
    super(Native.makeConversation(text));
  }

  /** All prompts and answers so far. */
  public String text() {
    return get(Native::conversationText);
  }
}
