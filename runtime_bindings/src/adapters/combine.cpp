// Several adapters as one.

#include "adapters/combine.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "adapters/adapter_file.h"
#include "logical/numbers.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

std::string module_key(const std::string& module, const char* half) {
  return format("{}{}{}.weight", module, module.empty() ? "" : ".", half);
}

/// Copy a matrix into a larger one.
/// @param row, column where it begins there.
void place(const TensorView& from, const TensorView& to, int64_t row, int64_t column) {
  const size_t item = from.nbytes / std::max<size_t>(static_cast<size_t>(count(from.sizes)), 1);
  const size_t width = static_cast<size_t>(from.sizes[1]) * item;
  const size_t stride = static_cast<size_t>(to.sizes[1]) * item;
  uint8_t* out = filling(to) + static_cast<size_t>(row) * stride + static_cast<size_t>(column) * item;
  for (int64_t i = 0; i < from.sizes[0] && width > 0; ++i, out += stride) {
    std::memcpy(out, from.data + static_cast<size_t>(i) * width, width);
  }
}

TensorView zeros(int8_t scalar_type, std::vector<int64_t> sizes) {
  TensorView made = make_tensor(scalar_type, std::move(sizes));
  if (made.nbytes > 0) {
    std::memset(filling(made), 0, made.nbytes);
  }
  return made;
}

/// The two tensors of a room while they are filled.
struct Filled {
  TensorView a;
  TensorView b;
  int64_t rank = 0; // so far
};

void check_features(const LoraPair& pair, const LoraPair& room, const std::string& origin, const std::string& target) {
  if (pair.in_features != room.in_features || pair.out_features != room.out_features) {
    throw_error_in(
        ErrorKind::Layout,
        origin,
        "module '{}' takes {} and gives {} features, in {} {} and {}",
        pair.module,
        pair.in_features,
        pair.out_features,
        target,
        room.in_features,
        room.out_features);
  }
}

} // namespace

TensorView scaled(const TensorView& tensor, double factor, int8_t target) {
  if (factor == 1) {
    return cast(tensor, target);
  }
  const uint64_t numbers = count(tensor.sizes);
  if (tensor.scalar_type == kDouble || target == kDouble) {
    const TensorView wide = cast(tensor, kDouble);
    const TensorView product = make_tensor(kDouble, tensor.sizes);
    for (uint64_t i = 0; i < numbers; ++i) {
      store(filling(product) + 8 * i, factor * load<double>(wide.data + 8 * i));
    }
    return cast(product, target);
  }
  const TensorView product = make_tensor(kFloat, tensor.sizes);
  auto* data = reinterpret_cast<float*>(filling(product));
  to_floats(tensor.scalar_type, tensor.data, numbers, data);
  const auto narrow = static_cast<float>(factor);
  std::transform(data, data + numbers, data, [narrow](float number) { return number * narrow; });
  return cast(product, target);
}

std::vector<Room> rooms_of(const std::vector<NamedTensor>& tensors, const std::string& origin) {
  std::map<std::string, int8_t> types;
  for (const NamedTensor& tensor : tensors) {
    types[tensor.name] = tensor.scalar_type;
  }
  std::vector<Room> rooms;
  for (LoraPair& pair :
       only_pairs(shapes_of(tensors), origin, "they cannot be combined with those of other adapters")) {
    const int8_t a_type = types.at(pair.a);
    const int8_t b_type = types.at(pair.b);
    rooms.push_back({std::move(pair), a_type, b_type});
  }
  return rooms;
}

std::vector<Room> rooms_for(const std::vector<ScaledAdapter>& adapters) {
  std::map<std::string, Room> rooms;
  for (const ScaledAdapter& one : adapters) {
    for (const Room& own : rooms_of(one.adapter->tensors(), one.adapter->path())) {
      const LoraPair& pair = own.pair;
      const auto [at, is_new] = rooms.emplace(pair.module, own);
      Room& room = at->second;
      if (is_new) {
        room.pair.a = module_key(pair.module, "lora_a");
        room.pair.b = module_key(pair.module, "lora_b");
        continue;
      }
      check_features(pair, room.pair, one.adapter->path(), "an adapter before it");
      room.pair.rank += pair.rank;
      if (room.a_type != own.a_type) {
        room.a_type = kFloat;
      }
      if (room.b_type != own.b_type) {
        room.b_type = kFloat;
      }
    }
  }
  std::vector<Room> list;
  for (auto& [module, room] : rooms) {
    list.push_back(std::move(room));
  }
  return list;
}

NamedViews combined(
    const std::vector<Room>& rooms,
    const std::vector<ScaledAdapter>& adapters,
    bool halves,
    const std::string& target) {
  std::map<std::string, Filled> filled;
  std::map<std::string, const Room*> by_module;
  for (const Room& room : rooms) {
    const LoraPair& pair = room.pair;
    by_module[pair.module] = &room;
    filled[pair.module] = {
        halves ? TensorView{} : zeros(room.a_type, {pair.rank, pair.in_features}),
        zeros(room.b_type, {pair.out_features, pair.rank}),
        0};
  }
  for (const ScaledAdapter& one : adapters) {
    const Adapter& adapter = *one.adapter;
    for (const auto& [pair, a_type, b_type] : rooms_of(adapter.tensors(), adapter.path())) {
      const auto known = by_module.find(pair.module);
      if (known == by_module.end()) {
        throw_error_in(ErrorKind::KeyNotFound, adapter.path(), "module '{}' has no adapter in {}", pair.module, target);
      }
      const Room& room = *known->second;
      check_features(pair, room.pair, adapter.path(), target);
      Filled& both = filled[pair.module];
      if (pair.rank > room.pair.rank - both.rank) {
        throw_error_in(
            ErrorKind::Adapter,
            adapter.path(),
            "module '{}' has rank {}, but of the {} in {} only {} are left",
            pair.module,
            pair.rank,
            room.pair.rank,
            target,
            room.pair.rank - both.rank);
      }
      const double factor = one.factor * AdapterAccess::impl(adapter).factor(pair.b);
      if (!halves) {
        place(cast(AdapterAccess::value(adapter, pair.a), room.a_type), both.a, both.rank, 0);
      }
      place(scaled(AdapterAccess::value(adapter, pair.b), factor, room.b_type), both.b, 0, both.rank);
      both.rank += pair.rank;
    }
  }
  NamedViews values;
  for (const Room& room : rooms) {
    const Filled& both = filled[room.pair.module];
    if (!halves) {
      values.emplace_back(room.pair.a, both.a);
    }
    values.emplace_back(room.pair.b, both.b);
  }
  return values;
}

CombinedAdapter combine_adapters(const std::vector<AdapterShare>& shares, const std::string* like) {
  std::vector<ScaledAdapter> adapters;
  std::optional<double> scale;
  std::shared_ptr<const Adapter> template_file;
  if (like != nullptr) {
    template_file = Adapter::read(*like);
    scale = template_file->scale();
  }
  for (const AdapterShare& share : shares) {
    const std::shared_ptr<const Adapter> adapter = Adapter::read(share.path);
    raise_first(adapter->problems());
    if (!adapter->scale()) {
      throw_error_in(ErrorKind::Adapter, adapter->path(), "records no scale; bind_adapter() adds it");
    }
    if (!scale) {
      scale = adapter->scale();
    }
    adapters.push_back({adapter, check_scale(share.strength, "strength")});
  }
  if (!scale || *scale == 0) {
    throw_error(ErrorKind::Adapter, "there is no scale for the sum: give an adapter, or one of the programs as `like`");
  }
  for (ScaledAdapter& one : adapters) {
    one.factor *= *one.adapter->scale() / *scale;
  }
  const std::vector<Room> rooms =
      template_file ? rooms_of(template_file->tensors(), template_file->path()) : rooms_for(adapters);
  return {*scale, combined(rooms, adapters, /*halves=*/false, template_file ? template_file->path() : "the sum")};
}

} // namespace blobstore::internal
