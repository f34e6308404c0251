// Updates by the names of a model's tensors, without Python; sanitizers judge the threads.
//
//   tensors_test FILE.ptd SHAPES.ptd
//
// tests/logical/native_tensors.py writes both. FILE.ptd has the tensor "weight", float[2, 3], also called "tied", that
// a delegate takes as it is ("weight@0000000000000000") and quantized to int8 ("weight@1111111111111111") with the
// scales in "scales"; "bias", float[2], that kernels take; and "state", which cannot be changed. SHAPES.ptd has "deep",
// float[1, ... 1], and "wide", float[0, 65536, 65536], which have more dimensions and larger strides than tensors of
// ExecuTorch.

#include <blobstore/tensors.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there
using executorch::extension::make_tensor_ptr;

executorch::extension::TensorPtr weight(float value) {
  return make_tensor_ptr({2, 3}, std::vector<float>(6, value));
}

executorch::extension::TensorPtr bias(float value) {
  return make_tensor_ptr({2}, std::vector<float>(2, value));
}

void test_shapes(const std::string& path) {
  const LogicalTensors tensors(BlobCache::open({path}));
  CHECK(tensors.at("deep").sizes.size() == 17);
  refused(ErrorKind::Layout, "no tensors of the shape [1, 1, 1", [&] { tensors.value("deep"); });
  refused(ErrorKind::Layout, "no tensors of the shape [0, 65536, 65536]", [&] { tensors.value("wide"); });
}

void test_updates(const std::string& path) {
  const auto cache = BlobCache::open({path});
  const LogicalTensors tensors(cache);
  CHECK(tensors.contains("weight") && tensors.contains("tied") && !tensors.contains("other"));
  CHECK(tensors.at("tied").name == "weight");
  const std::vector<std::string> keys = {"weight@0000000000000000", "weight@1111111111111111", "scales"};
  CHECK(tensors.at("weight").keys == keys);
  CHECK(!tensors.at("state").refusal.empty());
  tensors.update({{"tied", weight(3)}});
  CHECK(first(*cache, "weight@0000000000000000") == 3);
  CHECK(cache->at("weight@1111111111111111").data[0] == 6); // its scales are 0.5
  CHECK(tensors.value("weight")->const_data_ptr<float>()[5] == 3);
  tensors.update_state_dict({{"weight", weight(4)}, {"bias", bias(5)}, {"unused", bias(1)}});
  CHECK(first(*cache, "weight@0000000000000000") == 4 && first(*cache, "bias") == 5);
}

#ifdef NDEBUG // otherwise an assertion of ExecuTorch ends the process wherever the order is asked for
/// A tensor without an order of dimensions, which is row-major.
void test_no_dim_order(const std::string& path) {
  namespace et = executorch::aten;
  const auto cache = BlobCache::open({path});
  const LogicalTensors tensors(cache);
  std::vector<float> numbers{0, 1, 2, 3, 4, 5};
  et::SizesType sizes[]{2, 3};
  et::TensorImpl of_weight(et::ScalarType::Float, 2, sizes, numbers.data());
  tensors.update({{"weight", std::make_shared<et::Tensor>(&of_weight)}});
  CHECK(floats(*cache, "weight@0000000000000000") == numbers);
  et::TensorImpl of_bias(et::ScalarType::Float, 1, sizes, numbers.data() + 4);
  CHECK(of_bias.dim_order().data() == nullptr);
  cache->update({{"bias", std::make_shared<et::Tensor>(&of_bias)}});
  CHECK(first(*cache, "bias") == 4);
}
#endif

void test_refusals(const std::string& path) {
  const auto cache = BlobCache::open({path});
  const LogicalTensors tensors(cache);
  refused(ErrorKind::UnsupportedData, "is no tensor", [&] { tensors.update({{"weight", nullptr}}); });
  CHECK(cache->generation() == 0 && cache->dirty().empty());
  cache->close();
  refused(ErrorKind::Closed, "closed", [&] { tensors.update({{"weight", weight(1)}}); });
}

void test_threads(const std::string& path) {
  const auto cache = BlobCache::open({path});
  const LogicalTensors tensors(cache);
  tensors.update({{"weight", weight(0)}, {"bias", bias(0)}});
  const auto update = [&](int n) {
    const auto value = static_cast<float>(n % 64); // in the range of the scales
    tensors.update_state_dict({{"weight", weight(value)}, {"bias", bias(value)}});
  };
  const Repeating reads([&](int) {
    const BlobCache::Reading reading(*cache);
    CHECK(first(*cache, "weight@0000000000000000") == first(*cache, "bias"));
    CHECK(tensors.value("weight")->const_data_ptr<float>()[0] == first(*cache, "bias"));
  });
  const Repeating updates(update);
  for (int n = 0; n < 400; ++n) {
    update(n);
  }
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  test_shapes(argv[2]);
  test_updates(argv[1]);
#ifdef NDEBUG
  test_no_dim_order(argv[1]);
#endif
  test_refusals(argv[1]);
  test_threads(argv[1]);
}
