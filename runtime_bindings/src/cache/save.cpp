// The blobs of a cache as a file.

#include "cache/mapped_cache.h"
#include "format/file_kind.h"
#include "format/ptd_writer.h"
#include "os/output_file.h"

namespace blobstore::internal {

uint64_t MappedCache::save(const std::string& path, bool dirty_only) const {
  check_open();
  std::vector<std::string> inputs;
  for (const BlobCache* cache = this; cache != nullptr; cache = cache->base().get()) {
    for (const std::string& file : cache->files()) {
      inputs.push_back(file);
    }
  }
  check_data_output(path, inputs);
  check_files();
  OutputFile file(path);
  uint64_t size = 0;
  {
    const Reading reading(*this);
    PtdWriter writer(/*share=*/true, [this] { check_files(); });
    for (const auto& slot : blobs_.slots()) {
      if (!dirty_only || is_dirty(*slot)) {
        writer.add(slot->key, slot->layout, slot->alignment, slot->data, slot->size);
      }
    }
    size = writer.write(file);
  }
  file.commit();
  return size;
}

} // namespace blobstore::internal
