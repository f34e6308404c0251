// Whose turn it is on which runner.

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include <blobstore/adapters.h>
#include <blobstore/reading.h>
#include <blobstore/runners.h>

#include "adapters/adapter_file.h"
#include "adapters/exchange.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/on_cache.h"
#include "cache/thread_readings.h"
#include "logical/cache_tensors.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

namespace internal {
namespace {

constexpr std::chrono::milliseconds kPollTime{100};

} // namespace

struct StopState {
  std::mutex mutex;
  bool set = false;
  std::vector<std::weak_ptr<Requests>> waiting; // whom to wake
};

struct ConversationState {
  std::mutex mutex;
  std::string text;
  std::string unread; // the end of the text, which a runner generated and did not read
  uint64_t version = 0; // grows with the text
  bool busy = false; // changes only while its queue is locked
  std::weak_ptr<const Requests> queue; // that of the last request
};

/// A runner, and what its cache and its key/value cache have.
struct Seat {
  explicit Seat(std::shared_ptr<BlobCache> given) : cache(given), tensors(std::move(given)) {
    const std::vector<NamedTensor> all = named_tensors(tensors.updates().index());
    adaptable = std::any_of(all.begin(), all.end(), [](const NamedTensor& one) { return is_lora(one.name); });
  }

  std::shared_ptr<BlobCache> cache;
  CacheTensors tensors;
  bool adaptable = false; // whether its programs have room for an adapter

  // of the cache, since `generation`; unknown before the first request
  bool known = false;
  std::shared_ptr<const Adapter> adapter; // null for none
  double strength = 1;
  uint64_t generation = 0;

  // of the key/value cache
  std::weak_ptr<ConversationState> conversation; // whose text it has
  uint64_t version = 0; // of that

  bool busy = false;
  std::thread::id thread; // that runs a request on it
  uint64_t last = 0; // when it was used, counted in requests
};

/// A request.
struct Request {
  std::string prompt;
  std::shared_ptr<const Adapter> adapter;
  double strength = 1;
  std::shared_ptr<ConversationState> conversation;
  std::shared_ptr<StopState> stop;
  std::thread::id thread; // that made it
  size_t seat = 0; // that it has, if it has begun
  bool begun = false;

  bool stopped() const {
    if (stop == nullptr) {
      return false;
    }
    const std::lock_guard<std::mutex> guard(stop->mutex);
    return stop->set;
  }
};

/// The state behind a queue, which requests that run share with it.
class Requests : public std::enable_shared_from_this<Requests> {
 public:
  Requests(const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale);
  ~Requests();

  std::unique_ptr<RunnerQueue::Turn> begin(
      const std::string& prompt, const RequestOptions& options, const std::function<void()>& poll);
  void wake();
  /// Add to the text of the conversation. The request has a seat.
  void keep(const Request& request, const std::string& answer, const std::string& last);
  /// Free the seat. @param answered whether the request was finished.
  void end(const Request& request, bool answered);

 private:
  friend class blobstore::RunnerQueue; // which has all that needs no more than the mutex
  std::vector<std::string> names() const;
  void tell_caches() const;
  Request request_of(const std::string& prompt, const RequestOptions& options) const;
  void check_thread() const;
  void check_open() const;
  void wait_for_turn(Request& request, const std::function<void()>& poll);
  void give_seats();
  /// The number of the seat for a request; empty if all are taken.
  std::optional<size_t> best_seat(const Request& request) const;
  /// The conversation whose text the runner has read, all of it; null if there is none.
  static std::shared_ptr<ConversationState> kept_by(const Seat& seat);
  static bool conversation_busy(const Request& request);
  static void set_busy(const Request& request, bool busy);
  /// Have this woken when the stop is set.
  void watch(Stop& stop);
  /// @returns a Reading during which the cache has the adapter of the request.
  std::unique_ptr<BlobCache::Reading> bring_adapter(Seat& seat, const Request& request);
  void exchange(Seat& seat, const Request& request);
  bool has(const Seat& seat, const Request& request) const {
    return seat.known && seat.adapter == request.adapter &&
        (seat.adapter == nullptr || seat.strength == request.strength);
  }

  const std::optional<double> program_scale_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Seat> seats_; // the members of one that is busy belong to the request that runs on it
  std::deque<Request*> waiting_; // in their order
  std::map<std::string, std::shared_ptr<const Adapter>> adapters_;
  RunnerStats stats_;
  uint64_t requests_ = 0; // that began
  bool closed_ = false;
};

} // namespace internal

struct RunnerQueue::Turn::Impl {
  std::shared_ptr<internal::Requests> requests;
  internal::Request request;
  std::string prompt;
  bool resets = true;
  bool finished = false;
  bool ended = false;
  std::unique_ptr<BlobCache::Reading> reading;
};

namespace internal {

Requests::Requests(const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale)
    : program_scale_(program_scale) {
  if (program_scale) {
    check_scale(*program_scale, "program_scale");
  }
  if (caches.empty()) {
    throw_error(ErrorKind::Input, "there is no runner");
  }
  for (const std::shared_ptr<BlobCache>& cache : caches) {
    if (cache == nullptr) {
      throw_error(ErrorKind::Input, "the cache of a runner is null");
    }
    for (const Seat& seat : seats_) {
      if (seat.cache == cache) {
        throw_error_in(
            ErrorKind::Input,
            cache->name(),
            "two runners have this cache, but a cache has one adapter at a time; open one for each, on one base");
      }
    }
    const Seat& seat = seats_.emplace_back(cache);
    if (seat.adaptable) { // what it is made for is to be known to whoever changes the foundation
      const auto state = AdaptersOfCache::of(cache);
      const auto turn = state->take_turn(*cache);
      state->known(seat.tensors);
    }
  }
  tell_caches();
}

Requests::~Requests() {
  for (const Seat& seat : seats_) {
    AdaptersOfCache::of(seat.cache)->set_requested(nullptr);
  }
}

void Requests::check_open() const {
  if (closed_) {
    throw_error(ErrorKind::Closed, "the runners are closed");
  }
}

/// Whoever changes the foundation is to know which adapters may be asked for. The mutex is held.
void Requests::tell_caches() const {
  const auto all = std::make_shared<const AdaptersOfCache::Requested>(adapters_.begin(), adapters_.end());
  for (const Seat& seat : seats_) {
    AdaptersOfCache::of(seat.cache)->set_requested(all);
  }
}

/// The mutex is held.
std::vector<std::string> Requests::names() const {
  std::vector<std::string> names;
  for (const auto& [name, adapter] : adapters_) {
    names.push_back(name);
  }
  return names;
}

std::shared_ptr<ConversationState> Requests::kept_by(const Seat& seat) {
  auto kept = seat.conversation.lock();
  if (kept != nullptr) {
    const std::lock_guard<std::mutex> guard(kept->mutex);
    if (kept->version == seat.version) {
      return kept;
    }
  }
  return nullptr;
}

bool Requests::conversation_busy(const Request& request) {
  ConversationState* const conversation = request.conversation.get();
  if (conversation == nullptr) {
    return false;
  }
  const std::lock_guard<std::mutex> guard(conversation->mutex);
  return conversation->busy;
}

void Requests::set_busy(const Request& request, bool busy) {
  if (ConversationState* const conversation = request.conversation.get()) {
    const std::lock_guard<std::mutex> guard(conversation->mutex);
    conversation->busy = busy;
  }
}

void Requests::watch(Stop& stop) {
  StopState& state = *stop.state_;
  const std::lock_guard<std::mutex> guard(state.mutex);
  std::vector<std::weak_ptr<Requests>>& list = state.waiting;
  list.erase(std::remove_if(list.begin(), list.end(), [](const auto& one) { return one.expired(); }), list.end());
  if (std::none_of(list.begin(), list.end(), [this](const auto& one) { return one.lock().get() == this; })) {
    list.push_back(weak_from_this());
  }
}

/// The mutex is held.
Request Requests::request_of(const std::string& prompt, const RequestOptions& options) const {
  Request made;
  made.prompt = prompt;
  made.thread = std::this_thread::get_id();
  made.strength = check_scale(options.strength, "strength");
  made.conversation = options.conversation == nullptr ? nullptr : options.conversation->state_;
  made.stop = options.stop == nullptr ? nullptr : options.stop->state_;
  if (!options.adapter.empty()) {
    const auto found = adapters_.find(options.adapter);
    if (found == adapters_.end()) {
      const std::vector<std::string> known = names();
      throw_error(
          ErrorKind::KeyNotFound,
          "no adapter is called '{}'; there are {}",
          options.adapter,
          known.empty() ? "none" : quoted_names(known));
    }
    made.adapter = found->second;
  }
  if (ConversationState* const conversation = made.conversation.get()) {
    const std::lock_guard<std::mutex> guard(conversation->mutex);
    const auto queue = conversation->queue.lock();
    if (queue != nullptr && queue.get() != this) {
      throw_error(ErrorKind::Input, "the conversation belongs to other runners");
    }
    conversation->queue = weak_from_this();
  }
  return made;
}

/// @throws Error Unsupported: the thread would wait for itself. The mutex is held.
void Requests::check_thread() const {
  for (const Seat& seat : seats_) {
    if (seat.busy && seat.thread == std::this_thread::get_id()) {
      throw_error(ErrorKind::Unsupported, "this thread runs a request, so it cannot wait for another one");
    }
    if (ThreadReadings::any(*seat.cache)) {
      throw_error_in(
          ErrorKind::Unsupported, seat.cache->name(), "this thread is reading the cache, so it cannot change it now");
    }
  }
}

std::unique_ptr<RunnerQueue::Turn> Requests::begin(
    const std::string& prompt, const RequestOptions& options, const std::function<void()>& poll) {
  if (prompt.empty()) {
    throw_error(ErrorKind::Input, "the prompt is empty");
  }
  if (options.stop != nullptr) {
    watch(*options.stop);
  }
  auto impl = std::make_unique<RunnerQueue::Turn::Impl>();
  Request& request = impl->request;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    check_open();
    check_thread();
    request = request_of(prompt, options);
  }
  wait_for_turn(request, poll);
  if (!request.begun) {
    return nullptr;
  }
  impl->requests = shared_from_this();
  auto turn =
      std::unique_ptr<RunnerQueue::Turn>(new RunnerQueue::Turn(std::move(impl))); // from here on, it frees the seat
  RunnerQueue::Turn::Impl& mine = *turn->impl_;
  Seat& seat = seats_[request.seat];
  mine.reading = bring_adapter(seat, mine.request);
  const auto kept = kept_by(seat);
  seat.conversation.reset(); // until the request is finished
  mine.prompt = prompt;
  if (ConversationState* const conversation = mine.request.conversation.get()) {
    const std::lock_guard<std::mutex> guard(conversation->mutex);
    mine.resets = kept != mine.request.conversation;
    mine.prompt = (mine.resets ? conversation->text : conversation->unread) + prompt;
  }
  if (!mine.resets) {
    const std::lock_guard<std::mutex> guard(mutex_);
    ++stats_.continued;
  }
  return turn;
}

/// Wait until the request has a seat, or is stopped.
void Requests::wait_for_turn(Request& request, const std::function<void()>& poll) {
  std::unique_lock<std::mutex> lock(mutex_);
  check_open();
  waiting_.push_back(&request);
  give_seats();
  const auto leave = [&] {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), &request));
    give_seats(); // it may have kept its conversation's next one waiting
  };
  while (!request.begun) {
    if (closed_ || request.stopped()) {
      leave();
      check_open();
      return;
    }
    if (poll == nullptr) {
      changed_.wait(lock);
      continue;
    }
    changed_.wait_until(lock, std::chrono::system_clock::now() + kPollTime); // glibc 2.28 has no other clock here
    if (!request.begun) {
      lock.unlock();
      std::exception_ptr failed;
      try {
        poll();
      } catch (...) {
        failed = std::current_exception();
      }
      lock.lock();
      if (failed) {
        if (request.begun) {
          lock.unlock();
          end(request, /*answered=*/false);
        } else {
          leave();
        }
        std::rethrow_exception(failed);
      }
    }
  }
}

/// Let those begin who can, in their order. The mutex is held.
void Requests::give_seats() {
  if (closed_) {
    return;
  }
  bool any = false;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    Request& request = **at;
    const bool waits = request.stopped() || conversation_busy(request);
    const std::optional<size_t> number = waits ? std::nullopt : best_seat(request);
    if (!number) {
      ++at;
      continue;
    }
    Seat& seat = seats_[*number];
    seat.busy = true;
    seat.thread = request.thread;
    seat.last = ++requests_;
    set_busy(request, true);
    request.seat = *number;
    request.begun = true;
    at = waiting_.erase(at);
    any = true;
  }
  if (any) {
    changed_.notify_all();
  }
}

std::optional<size_t> Requests::best_seat(const Request& request) const {
  std::optional<size_t> best;
  std::array<bool, 3> best_rank{};
  for (size_t number = 0; number < seats_.size(); ++number) {
    const Seat& seat = seats_[number];
    if (seat.busy) {
      continue;
    }
    const auto kept = kept_by(seat);
    const std::array<bool, 3> rank{
        kept != nullptr && kept == request.conversation, kept == nullptr, has(seat, request)};
    if (!best || rank > best_rank || (rank == best_rank && seat.last < seats_[*best].last)) {
      best = number;
      best_rank = rank;
    }
  }
  return best;
}

std::unique_ptr<BlobCache::Reading> Requests::bring_adapter(Seat& seat, const Request& request) {
  for (;;) {
    if (!has(seat, request) || seat.cache->generation() != seat.generation) {
      exchange(seat, request);
    }
    auto reading = std::make_unique<BlobCache::Reading>(*seat.cache);
    if (seat.cache->generation() == seat.generation) {
      return reading;
    }
    // somebody else changed weights in between
  }
}

void Requests::exchange(Seat& seat, const Request& request) {
  seat.cache->check_open();
  if (!seat.adaptable && request.adapter == nullptr) {
    seat.known = true;
    seat.generation = seat.cache->generation();
    seat.conversation.reset();
    return;
  }
  if (seat.known && seat.adapter != nullptr && seat.adapter == request.adapter &&
      seat.cache->generation() == seat.generation) {
    seat.generation = set_adapter_strengths(seat.tensors, {request.strength});
  } else {
    std::vector<OpenShare> shares;
    if (request.adapter != nullptr) {
      AdapterAccess::impl(*request.adapter).check_unchanged();
      shares.push_back({request.adapter, request.strength});
    }
    seat.generation = load_adapters(seat.tensors, shares, program_scale_);
  }
  seat.known = true;
  seat.adapter = request.adapter;
  seat.strength = request.strength;
  seat.conversation.reset(); // it was read with other weights
  const std::lock_guard<std::mutex> guard(mutex_);
  ++stats_.exchanges;
}

void Requests::keep(const Request& request, const std::string& answer, const std::string& last) {
  ConversationState* const conversation = request.conversation.get();
  if (conversation == nullptr) {
    return;
  }
  Seat& seat = seats_[request.seat];
  const std::lock_guard<std::mutex> guard(conversation->mutex);
  conversation->text += request.prompt + answer;
  conversation->unread = last;
  seat.version = ++conversation->version;
  seat.conversation = request.conversation;
}

void Requests::end(const Request& request, bool answered) {
  const std::lock_guard<std::mutex> guard(mutex_);
  seats_[request.seat].busy = false;
  set_busy(request, false);
  ++(answered ? stats_.answered : stats_.failed);
  give_seats();
  changed_.notify_all();
}

void Requests::wake() {
  const std::lock_guard<std::mutex> guard(mutex_);
  changed_.notify_all();
}

} // namespace internal

Stop::Stop() : state_(std::make_shared<internal::StopState>()) {}
Stop::~Stop() = default;

void Stop::set() {
  std::vector<std::weak_ptr<internal::Requests>> waiting;
  {
    const std::lock_guard<std::mutex> guard(state_->mutex);
    state_->set = true;
    waiting = state_->waiting;
  }
  for (const auto& one : waiting) {
    if (const auto requests = one.lock()) {
      requests->wake();
    }
  }
}

bool Stop::is_set() const {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->set;
}

Conversation::Conversation() : state_(std::make_shared<internal::ConversationState>()) {}
Conversation::Conversation(std::string text) : Conversation() {
  state_->text = std::move(text);
}
Conversation::~Conversation() = default;

std::string Conversation::text() const {
  const std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->text;
}

RunnerQueue::Turn::Turn(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

RunnerQueue::Turn::~Turn() {
  end();
}

void RunnerQueue::Turn::end() {
  if (!impl_->ended) {
    impl_->ended = true;
    impl_->reading.reset();
    impl_->requests->end(impl_->request, impl_->finished);
  }
}

size_t RunnerQueue::Turn::runner() const {
  return impl_->request.seat;
}

bool RunnerQueue::Turn::resets() const {
  return impl_->resets;
}

const std::string& RunnerQueue::Turn::prompt() const {
  return impl_->prompt;
}

bool RunnerQueue::Turn::stopped() const {
  return impl_->request.stopped();
}

void RunnerQueue::Turn::finish(const std::string& answer, const std::string& last) {
  if (!impl_->finished && !impl_->ended) {
    impl_->requests->keep(impl_->request, answer, last);
    impl_->finished = true;
  }
}

RunnerQueue::RunnerQueue(const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale)
    : requests_(std::make_shared<internal::Requests>(caches, program_scale)) {}

RunnerQueue::~RunnerQueue() {
  close();
}

void RunnerQueue::set_adapter(const std::string& name, const std::string& path) {
  if (name.empty()) {
    internal::throw_error_in(ErrorKind::Input, path, "the name of an adapter must not be empty");
  }
  const std::shared_ptr<const Adapter> adapter = Adapter::read(path);
  internal::raise_first(adapter->problems());
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  requests_->check_open();
  requests_->adapters_[name] = adapter;
  requests_->tell_caches();
}

void RunnerQueue::remove_adapter(const std::string& name) {
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  requests_->check_open();
  if (requests_->adapters_.erase(name) == 0) {
    internal::throw_error(ErrorKind::KeyNotFound, "no adapter is called '{}'", name);
  }
  requests_->tell_caches();
}

std::vector<std::string> RunnerQueue::adapters() const {
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  return requests_->names();
}

std::unique_ptr<RunnerQueue::Turn> RunnerQueue::begin(
    const std::string& prompt, const RequestOptions& options, const std::function<void()>& poll) {
  return requests_->begin(prompt, options, poll);
}

RunnerStats RunnerQueue::stats() const {
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  RunnerStats now = requests_->stats_;
  now.waiting = requests_->waiting_.size();
  now.running = static_cast<uint64_t>(std::count_if(
      requests_->seats_.begin(), requests_->seats_.end(), [](const internal::Seat& seat) { return seat.busy; }));
  return now;
}

void RunnerQueue::close() {
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  requests_->closed_ = true;
  requests_->changed_.notify_all();
}

bool RunnerQueue::closed() const {
  const std::lock_guard<std::mutex> guard(requests_->mutex_);
  return requests_->closed_;
}

Error RunnerQueue::failure(const char* call, int number) {
  const std::optional<DelegateFailure> why = take_delegate_failure();
  const bool too_long = number == static_cast<int>(executorch::runtime::Error::InvalidArgument);
  const std::string reason = why ? ": " + why->reason : too_long ? "; the text may be too long for the program" : "";
  const bool loads = std::string_view(call) == "load";
  return {
      loads ? ErrorKind::Program : ErrorKind::Execution,
      "",
      internal::format("{} of ExecuTorch's runner ended with error {}{}", call, number, reason),
      number};
}

void RunnerQueue::raise(const Error& error) {
  throw error;
}

} // namespace blobstore
