// Opens FILE.ptd and prints its number of keys, or the kind of the library's error.

#include <cstdio>
#include <typeinfo>

#include <blobstore/cache.h>

int main(int argc, char** argv) {
  try {
    const auto cache = blobstore::BlobCache::open({argv[argc - 1]});
    const bool has_type = typeid(*cache) != typeid(blobstore::BlobCache);
    std::printf("%zu keys%s\n", cache->size(), has_type ? "" : " in a cache without a type");
  } catch (const blobstore::Error& error) { // not as std::exception: the type is known on both sides
    std::printf("%d\n", static_cast<int>(error.kind()));
  }
  return 0;
}
