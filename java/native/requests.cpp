// Requests to language models in Java. Java calls the runners.
#include <blobstore/delegate.h>
#include <blobstore/runners.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

using Turn = RunnerQueue::Turn;

std::shared_ptr<RunnerQueue> make_queue(
    const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> scale) {
  return std::make_shared<RunnerQueue>(caches, scale);
}

void set_adapter(RunnerQueue& queue, const std::string& name, const Path& path) {
  queue.set_adapter(name, path.text);
}

std::vector<uint64_t> stats(const RunnerQueue& queue) {
  const RunnerStats now = queue.stats();
  return {now.answered, now.failed, now.exchanges, now.continued, now.waiting, now.running};
}

/// @returns 0 if the request was stopped while it waited.
std::unique_ptr<Turn> begin(
    RunnerQueue& queue,
    const std::string& prompt,
    const std::string& adapter,
    double strength,
    const std::shared_ptr<Conversation>& conversation,
    const std::shared_ptr<Stop>& stop) {
  return queue.begin(prompt, {adapter, strength, conversation, stop});
}

/// A scope of this thread, which the thread must free.
std::shared_ptr<CacheScope> enter_scope(const std::shared_ptr<BlobCache>& cache) {
  register_delegate();
  return std::make_shared<CacheScope>(cache);
}

std::shared_ptr<Conversation> make_conversation(const std::string& text) {
  return std::make_shared<Conversation>(text);
}

std::shared_ptr<Stop> make_stop() {
  return std::make_shared<Stop>();
}

} // namespace

std::vector<Row> request_rows() {
  return {
      row<&make_queue>("makeQueue"),
      row<&set_adapter>("queueSetAdapter"),
      row<&RunnerQueue::remove_adapter>("queueRemoveAdapter"),
      row<&RunnerQueue::adapters>("queueAdapters"),
      row<&stats>("queueStats"),
      row<&RunnerQueue::close>("queueClose"),
      row<&begin>("queueBegin"),
      row<&Turn::runner>("turnRunner"),
      row<&Turn::resets>("turnResets"),
      row<&Turn::prompt>("turnPrompt"),
      row<&Turn::stopped>("turnStopped"),
      row<&Turn::finish>("turnFinish"),
      row<&enter_scope>("enterScope"),
      row<&make_conversation>("makeConversation"),
      row<&Conversation::text>("conversationText"),
      row<&make_stop>("makeStop"),
      row<&Stop::set>("setStop"),
      row<&Stop::is_set>("isStopSet")};
}

} // namespace blobstore::java
