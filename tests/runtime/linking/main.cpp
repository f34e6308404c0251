// Opens FILE.ptd and prints its number of keys, or the kind of the library's error.

#include <cstdio>

#include <blobstore/cache.h>

int main(int argc, char** argv) {
  try {
    std::printf("%zu keys\n", blobstore::BlobCache::open({argv[argc - 1]})->size());
  } catch (const blobstore::Error& error) { // not as std::exception: the type is known on both sides
    std::printf("%d\n", static_cast<int>(error.kind()));
  }
  return 0;
}
