// Prints what the stock FlatTensorDataMap finds in a .ptd.
//
//   data_reader FILE.ptd
//
// One line per key, in the order of get_key(): the key, its scalar type, sizes and dimension order (each joined by
// 'x'), and its bytes; key and bytes in hexadecimal. It asks for the layout of every key, as ExecuTorch's
// load_state_dict does; this map crashes at a key that has none. The exit code is ExecuTorch's error number, or 64 for
// wrong arguments.

#include <cstdio>
#include <cstdlib>
#include <string>

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/flat_tensor/flat_tensor_data_map.h>

namespace {

template <typename Result>
auto unwrap(Result&& result, const char* step) {
  if (!result.ok()) {
    std::fprintf(stderr, "data_reader: %s: error %d\n", step, static_cast<int>(result.error()));
    std::exit(static_cast<int>(result.error()));
  }
  return std::move(result.get());
}

std::string hex(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::string text;
  char digits[3];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", bytes[i]);
    text += digits;
  }
  return text;
}

template <typename Numbers>
std::string join(const Numbers& numbers) {
  std::string text;
  for (const auto number : numbers) {
    text += (text.empty() ? "" : "x") + std::to_string(number);
  }
  return text;
}

} // namespace

int main(int argc, char** argv) {
  using executorch::extension::FlatTensorDataMap;
  using executorch::extension::MmapDataLoader;
  if (argc != 2) {
    return 64;
  }
  auto loader = unwrap(MmapDataLoader::from(argv[1]), "open");
  auto map = unwrap(FlatTensorDataMap::load(&loader), "load");
  const auto count = unwrap(map.get_num_keys(), "get_num_keys");
  for (uint32_t i = 0; i < count; ++i) {
    const std::string key = unwrap(map.get_key(i), "get_key");
    const std::string name = hex(key.data(), key.size());
    const auto found = unwrap(map.get_tensor_layout(key), "get_tensor_layout");
    const std::string layout = std::to_string(static_cast<int>(found.scalar_type())) + "," + join(found.sizes()) + "," +
        join(found.dim_order());
    const auto data = unwrap(map.get_data(key), "get_data");
    std::printf("%s %s %s\n", name.c_str(), layout.c_str(), hex(data.data(), data.size()).c_str());
  }
  return 0;
}
