// Trains tensors without gradients; a test in Python compares what they become.
//
//   mezo_test DATA.ptd [STEPS TARGET.ptd]
//
// DATA.ptd has tensors of float32. The loss is how far the first number is from 1. The first form tries the
// functions without exceptions.

#include <cmath>

#include <blobstore/mezo.h>
#include <blobstore/nothrow.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

MeZOOptions options() {
  MeZOOptions made;
  made.lr = 0.01;
  made.eps = 0.01;
  made.seed = 7;
  return made;
}

double distance(const BlobCache& cache, const std::string& name) {
  return std::fabs(static_cast<double>(floats(cache, name).front()) - 1);
}

/// A step without exceptions is a step, and errors are values.
void without_exceptions(const std::shared_ptr<BlobCache>& cache) {
  auto made = nothrow::mezo(cache, options());
  CHECK(made.ok());
  MeZO& optimizer = **made;
  const std::string name = optimizer.names().front();
  const auto before = floats(*cache, name);
  CHECK(nothrow::step(optimizer, [&] { return distance(*cache, name); }).ok());
  CHECK(optimizer.steps() == 1 && floats(*cache, name) != before);
  CHECK(!nothrow::mezo(cache, options(), {"missing"}).ok());
  MeZOOptions bad = options();
  bad.lr = -1;
  CHECK(nothrow::set_options(optimizer, bad).error().kind() == ErrorKind::Training);
  CHECK(optimizer.options().lr == options().lr);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2 || argc == 4);
  const auto cache = BlobCache::open({argv[1]});
  MeZO optimizer(cache, options());
  if (argc == 2) {
    without_exceptions(cache);
    return 0;
  }
  for (int steps = std::stoi(argv[2]); steps > 0; --steps) {
    (void)optimizer.step([&] { return distance(*cache, optimizer.names().front()); });
  }
  (void)cache->save(argv[3]);
}
