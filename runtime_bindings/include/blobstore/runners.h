// Requests to a language model, each with an adapter of its own, on one or several of ExecuTorch's runners.
//
//   using executorch::extension::llm::TextLLMRunner;
//   auto foundation = blobstore::BlobCache::open({"foundation.ptd"});
//   auto layer = blobstore::BlobCache::open({"llama_lora.ptd"}, blobstore::BlobCache::Mode::Private, foundation);
//   std::vector<blobstore::RunnerOnCache<TextLLMRunner>> pairs;
//   pairs.push_back({std::move(runner), layer}); // one layer for each runner
//   blobstore::Runners<TextLLMRunner> runners(std::move(pairs));
//   runners.set_adapter("support", "support.ptd");
//   auto answer = runners.generate("My invoice is wrong.", config, {"support", 0.8});
//
// docs/language-models.md says in which order requests run, and what they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/core/error.h>

#include <blobstore/cache.h>
#include <blobstore/delegate.h>
#include <blobstore/error.h>
#include <blobstore/export.h>
#include <blobstore/result.h>

namespace blobstore BLOBSTORE_API {

class RunnerQueue;

namespace internal BLOBSTORE_HIDDEN {
struct ConversationState;
class Requests;
struct StopState;
} // namespace internal BLOBSTORE_HIDDEN

/// Ends a request early, from any thread. One that waits never begins, and its answer is empty; one that runs ends at
/// one of its next two tokens, and its answer is what was generated so far. Stays set; may be given to several
/// requests.
class Stop {
 public:
  Stop();
  ~Stop();
  Stop(const Stop&) = delete;
  Stop& operator=(const Stop&) = delete;

  void set();
  bool is_set() const;

 private:
  friend class internal::Requests;
  std::shared_ptr<internal::StopState> state_;
};

/// A text that grows with each request: its prompt, then the answer. The next request goes on where the text ends.
///
/// A runner that has read the text keeps its key/value cache for it, and then reads only what is new. It reads the
/// whole text again if another request had the runner in between, if the request has another adapter or strength, or if
/// any weight was changed since. A request that fails leaves the text as it was. The requests of one conversation run
/// one after another, in their order. Any thread may use it at any time.
class Conversation {
 public:
  Conversation();
  /// @param text what was said so far. The first request reads it.
  explicit Conversation(std::string text);
  ~Conversation();
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  std::string text() const;

 private:
  friend class internal::Requests;
  std::shared_ptr<internal::ConversationState> state_;
};

/// What a request runs with.
struct RequestOptions {
  std::string adapter; // by its name; empty for the foundation alone
  double strength = 1; // 1 is what the adapter was trained for, 0 turns it off
  std::shared_ptr<Conversation> conversation = nullptr; // none: the prompt is the whole text
  std::shared_ptr<Stop> stop = nullptr;
};

/// Counts since the queue was made, and of now.
struct RunnerStats {
  uint64_t answered = 0; // requests that were finished, also early
  uint64_t failed = 0; // of those that began
  uint64_t exchanges = 0; // of adapters and of strengths
  uint64_t continued = 0; // requests that used the key/value cache of their conversation
  uint64_t waiting = 0; // now
  uint64_t running = 0; // now
};

/// Whose turn it is on which runner, and the adapters of the runners. For those who call a runner themselves: `Runners`
/// does all of this.
///
/// Threads: any thread may call any function at any time. `begin` blocks until a runner is free and its cache has the
/// adapter; nothing else blocks.
class RunnerQueue {
 public:
  /// A request that runs. Its weights do not change while it lives: commits to its cache and to the base wait.
  class Turn {
   public:
    /// Frees the runner. Any thread may do it.
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    /// The runner to use, by its place among the caches.
    size_t runner() const;
    /// Whether the runner must be reset before it reads `prompt`. Otherwise its key/value cache is that of the text
    /// before it.
    bool resets() const;
    /// What the runner reads.
    const std::string& prompt() const;
    /// Whether the request was stopped. To be asked after each token.
    bool stopped() const;
    /// Call it when the runner has generated the answer; otherwise the request has failed.
    /// @param answer all of it. @param last its last token as text, which the runner did not read any more.
    void finish(const std::string& answer, const std::string& last);
    /// Free the runner now. Further calls do nothing.
    void end();

   private:
    friend class internal::Requests;
    struct BLOBSTORE_HIDDEN Impl;
    explicit Turn(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
  };

  /// @param caches one for each runner: layers with the tensors of an adapter, on one base. Held.
  /// @param program_scale as for `load_adapters`.
  /// @throws Error Input: there is no cache, or one is there twice or null. Adapter: `program_scale` is not finite.
  ///   Closed. Or what `LogicalTensors` throws.
  explicit RunnerQueue(
      const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale = std::nullopt);
  /// Requests that run go on.
  ~RunnerQueue();
  RunnerQueue(const RunnerQueue&) = delete;
  RunnerQueue& operator=(const RunnerQueue&) = delete;

  /// Give an adapter a name, or a name another adapter. Its file stays mapped; see `Adapter`. Requests that wait or run
  /// keep the adapter that the name stood for when they were made.
  /// @throws Error Input: the name is empty. Closed. Or what `Adapter::read` throws. Adapter, Layout, Update: the
  ///   adapter has problems.
  void set_adapter(const std::string& name, const std::string& path);
  /// @throws Error KeyNotFound: there is no such adapter. Closed.
  void remove_adapter(const std::string& name);
  /// In the order of the alphabet.
  std::vector<std::string> adapters() const;

  /// Wait for a runner. Requests begin in the order in which they were made, but for those of a conversation that has
  /// another one running. Of the free runners, a request gets the one with the key/value cache of its conversation, or
  /// else one that keeps none for another, or else one that has its adapter, or else the one that was unused for
  /// longest.
  ///
  /// @param poll called about ten times a second while the request waits, without any lock; what it throws ends the
  ///   request.
  /// @returns null if the request was stopped while it waited.
  /// @throws Error Input: the prompt is empty, or the conversation belongs to another queue. KeyNotFound: no adapter
  ///   has that name. Adapter: the strength is not finite. Unsupported: this thread runs a request, or reads one of the
  ///   caches. Closed: also if the queue is closed while the request waits. Or what `load_adapters` throws; other
  ///   requests are not affected.
  std::unique_ptr<Turn> begin(
      const std::string& prompt, const RequestOptions& options = {}, const std::function<void()>& poll = nullptr);

  RunnerStats stats() const;
  /// Refuse all further requests, also those that wait. Requests that run go on to their end.
  void close();
  bool closed() const;

  /// Why a runner failed, with the reason of a delegate if one failed on this thread.
  /// @param call what failed. @param number ExecuTorch's error.
  static Error failure(const char* call, int number);
  /// For templates, which may be compiled without exceptions.
  [[noreturn]] static void raise(const Error& error);

 private:
  std::shared_ptr<internal::Requests> requests_;
};

namespace internal BLOBSTORE_HIDDEN {

/// Let a runner answer.
template <typename Runner, typename Config>
Result<std::string> answer(
    RunnerQueue::Turn& turn,
    Runner& runner,
    const Config& config,
    const std::function<void(const std::string&)>& on_token) {
  Config settings = config;
  settings.echo = false;
  settings.num_eos = 0;
  if (turn.resets()) {
    runner.reset();
  } else {
    settings.num_bos = 0;
  }
  std::string text;
  std::string last;
  const executorch::runtime::Error error = runner.generate(turn.prompt(), settings, [&](const std::string& piece) {
    text += piece;
    last = piece;
    if (on_token) {
      on_token(piece);
    }
    if (turn.stopped()) {
      runner.stop();
    }
  });
  if (error != executorch::runtime::Error::Ok) {
    return RunnerQueue::failure("generate", static_cast<int>(error));
  }
  turn.finish(text, last);
  return text;
}

/// Load the methods of a runner on a cache.
template <typename Runner>
Result<void> load_on(Runner& runner, const std::shared_ptr<BlobCache>& cache) {
  register_delegate();
  const CacheScope scope(cache);
  const executorch::runtime::Error error = runner.load();
  return error == executorch::runtime::Error::Ok ? Result<void>()
                                                 : RunnerQueue::failure("load", static_cast<int>(error));
}

} // namespace internal BLOBSTORE_HIDDEN

/// A runner of ExecuTorch's and the cache that it runs on.
template <typename Runner>
struct RunnerOnCache {
  std::shared_ptr<Runner> runner; // not loaded yet
  std::shared_ptr<BlobCache> cache; // of its own: a layer with the tensors of an adapter
};

/// Runners that answer requests, each with the adapter of the request. As many requests run at the same time as there
/// are runners; the others wait. Applications without exceptions use `nothrow::make_runners` and `nothrow::generate`.
///
/// Threads: any thread may call any function at any time. `generate` runs on the thread that calls it.
///
/// @tparam Runner `executorch::extension::llm::TextLLMRunner`, or a class with its `load`, `generate`, `reset` and
///   `stop`. As with that one, `generate` goes on where the runner stopped unless it was reset, and has then read all
///   but the last token of the answer; `stop` is called by the callback.
template <typename Runner>
class Runners {
 public:
  /// Load all runners. @throws Error Input: there is no runner, or one is null. Program: one cannot be loaded. Or what
  ///   `RunnerQueue` throws.
  explicit Runners(std::vector<RunnerOnCache<Runner>> runners, std::optional<double> program_scale = std::nullopt)
      : Runners(std::make_unique<RunnerQueue>(caches_of(runners), program_scale), std::move(runners)) {
    if (const Result<void> loaded = load(); !loaded.ok()) {
      RunnerQueue::raise(loaded.error());
    }
  }

  /// Generate an answer.
  ///
  /// @param prompt not empty. In a conversation, what comes after its text.
  /// @param config ExecuTorch's `GenerationConfig`. `echo` and `num_eos` are not used, `num_bos` where a text begins.
  /// @param on_token called for each token, on this thread. What it throws ends the request.
  /// @returns the text of all tokens.
  /// @throws Error Execution: ExecuTorch's runner failed; `number()` is its error, 18 if the text is too long for the
  ///   program. Or what `RunnerQueue::begin` throws.
  template <typename Config>
  std::string generate(
      const std::string& prompt,
      const Config& config,
      const RequestOptions& options = {},
      const std::function<void(const std::string&)>& on_token = nullptr) {
    const std::unique_ptr<RunnerQueue::Turn> turn = queue_->begin(prompt, options);
    if (turn == nullptr) {
      return "";
    }
    Result<std::string> answer = internal::answer(*turn, *runners_[turn->runner()].runner, config, on_token);
    if (!answer.ok()) {
      RunnerQueue::raise(answer.error());
    }
    return std::move(answer).get();
  }

  void set_adapter(const std::string& name, const std::string& path) { queue_->set_adapter(name, path); }
  void remove_adapter(const std::string& name) { queue_->remove_adapter(name); }
  std::vector<std::string> adapters() const { return queue_->adapters(); }
  RunnerStats stats() const { return queue_->stats(); }
  void close() { queue_->close(); }
  bool closed() const { return queue_->closed(); }

  // for nothrow.h
  Runners(std::unique_ptr<RunnerQueue> queue, std::vector<RunnerOnCache<Runner>>&& runners)
      : queue_(std::move(queue)), runners_(std::move(runners)) {}
  Result<void> load() {
    for (const RunnerOnCache<Runner>& one : runners_) {
      if (one.runner == nullptr) {
        return Error(ErrorKind::Input, "a runner is null");
      }
      if (Result<void> loaded = internal::load_on(*one.runner, one.cache); !loaded.ok()) {
        return loaded;
      }
    }
    return {};
  }
  static std::vector<std::shared_ptr<BlobCache>> caches_of(const std::vector<RunnerOnCache<Runner>>& runners) {
    std::vector<std::shared_ptr<BlobCache>> caches;
    for (const RunnerOnCache<Runner>& one : runners) {
      caches.push_back(one.cache);
    }
    return caches;
  }
  RunnerQueue& queue() { return *queue_; }
  Runner& runner(size_t index) { return *runners_[index].runner; }

 private:
  std::unique_ptr<RunnerQueue> queue_;
  std::vector<RunnerOnCache<Runner>> runners_;
};

} // namespace blobstore
