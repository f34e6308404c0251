// Attention with a key/value cache, as programs of ExecuTorch's exporter of language models call it. ExecuTorch itself
// has these kernels in a library that needs torch. They are not registered, because a second registration, when that
// library is loaded later, would end the process: methods get them as they are loaded, for operators that have no
// kernel then.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "convert.h"
#include "program/loaded_method.h"

// The wheel of ExecuTorch exports this from its library of kernels, without a header.
namespace executorch::cpublas {
enum class TransposeType { NoTranspose, Transpose, ConjTranspose };
/// c = alpha * a * b + beta * c, of matrices whose columns are contiguous.
void gemm(
    TransposeType of_a,
    TransposeType of_b,
    int64_t m,
    int64_t n,
    int64_t k,
    float alpha,
    const float* a,
    int64_t a_stride,
    const float* b,
    int64_t b_stride,
    float beta,
    float* c,
    int64_t c_stride);
} // namespace executorch::cpublas

namespace blobstore::python {
namespace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::cpublas::TransposeType;
using Context = et::KernelRuntimeContext;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kKeys = 512; // that are looked at together
constexpr int64_t kLanes = 16; // of a sum, so that the compiler can use vectors
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// [batch, position, head, number], or [batch, head, position, number], with a scale and a zero point for each row of
/// numbers if these are int8.
struct Heads {
  const Tensor& tensor;
  OptionalTensor zeros;
  OptionalTensor scales;
  bool position_last;

  int64_t positions() const { return tensor.size(position_last ? 2 : 1); }
  int64_t heads() const { return tensor.size(position_last ? 1 : 2); }
  int64_t width() const { return tensor.size(3); }
  bool valid() const {
    if (tensor.dim() != 4 || tensor.numel() == 0 || !et::is_contiguous_dim_order(tensor.dim_order().data(), 4)) {
      return false;
    }
    switch (tensor.scalar_type()) {
      case ScalarType::Float:
      case ScalarType::Half:
      case ScalarType::BFloat16:
        return true;
      case ScalarType::Char:
        return fits(zeros, ScalarType::Char) && fits(scales, ScalarType::Float);
      default:
        return false;
    }
  }
  /// The row of a position, counted in rows.
  int64_t row(int64_t batch, int64_t head, int64_t position) const {
    return position_last ? (batch * heads() + head) * positions() + position
                         : (batch * positions() + position) * heads() + head;
  }
  /// From the row of one position to that of the next.
  int64_t step() const { return position_last ? 1 : heads(); }

 private:
  bool fits(const OptionalTensor& numbers, ScalarType type) const {
    return numbers && numbers->dim() == 4 && numbers->scalar_type() == type && numbers->size(3) == 1 &&
        numbers->numel() * width() == tensor.numel();
  }
};

/// Rows of floats, `stride` floats apart.
struct Rows {
  const float* data;
  int64_t stride;
};

template <typename T>
Rows converted(const Heads& heads, int64_t first, int64_t count, float* room) {
  const int64_t width = heads.width();
  const T* data = heads.tensor.const_data_ptr<T>();
  for (int64_t i = 0; i < count; ++i) {
    const T* row = data + (first + i * heads.step()) * width;
    std::transform(row, row + width, room + i * width, [](T value) { return static_cast<float>(value); });
  }
  return {room, width};
}

Rows dequantized(const Heads& heads, int64_t first, int64_t count, float* room) {
  const int64_t width = heads.width();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = first + i * heads.step();
    const int zero = heads.zeros->const_data_ptr<int8_t>()[at];
    const float scale = heads.scales->const_data_ptr<float>()[at];
    const int8_t* row = heads.tensor.const_data_ptr<int8_t>() + at * width;
    std::transform(row, row + width, room + i * width, [=](int8_t value) { return (value - zero) * scale; });
  }
  return {room, width};
}

/// Some positions of a head as floats: where they are, or in `room`.
Rows rows(const Heads& heads, int64_t first, int64_t count, float* room) {
  switch (heads.tensor.scalar_type()) {
    case ScalarType::Float:
      return {heads.tensor.const_data_ptr<float>() + first * heads.width(), heads.step() * heads.width()};
    case ScalarType::Half:
      return converted<executorch::aten::Half>(heads, first, count, room);
    case ScalarType::BFloat16:
      return converted<executorch::aten::BFloat16>(heads, first, count, room);
    default:
      return dequantized(heads, first, count, room);
  }
}

/// Replace numbers by the exponential of their distance to the largest; their sum.
float exponentials(float* data, int64_t count, float largest) {
  std::array<float, kLanes> lanes{};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      data[i + lane] = std::exp(data[i + lane] - largest);
      lanes[lane] += data[i + lane];
    }
  }
  float sum = 0;
  for (const float lane : lanes) {
    sum += lane;
  }
  for (int64_t i = whole; i < count; ++i) {
    data[i] = std::exp(data[i] - largest);
    sum += data[i];
  }
  return sum;
}

/// What one call of an attention works on.
struct Attention {
  Heads query;
  Heads key;
  Heads value;
  const OptionalTensor& mask; // [positions of the query, keys]
  bool causal; // no position looks at later ones
  int64_t start; // the position of the first query
  int64_t keys; // that are looked at
  int64_t block; // queries that are looked at together
  float scale;
  Tensor& out;

  /// Floats that one thread works in.
  int64_t room() const { return block * (2 * query.width() + kKeys + 2) + 2 * kKeys * query.width(); }
  int64_t blocks() const { return (query.positions() + block - 1) / block; }
  void run(int64_t task, float* room) const;

 private:
  void hide_later(float* scores, int64_t first_query, int64_t queries, int64_t first_key, int64_t count) const;
  float weigh(float* row, int64_t query_at, int64_t first_key, int64_t count) const;
  void store(const float* sums, const float* totals, int64_t batch, int64_t head, int64_t first, int64_t count) const;
};

void Attention::hide_later(
    float* scores, int64_t first_query, int64_t queries, int64_t first_key, int64_t count) const {
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t seen = std::clamp<int64_t>(start + first_query + i + 1 - first_key, 0, count);
    std::fill(scores + i * count + seen, scores + (i + 1) * count, kMinusInfinity);
  }
}

/// Scale the scores of a query, and add the mask; the largest.
float Attention::weigh(float* row, int64_t query_at, int64_t first_key, int64_t count) const {
  if (mask) {
    const float* added = mask->const_data_ptr<float>() + query_at * keys + first_key;
    std::transform(row, row + count, added, row, [=](float score, float more) { return score * scale + more; });
  } else {
    std::transform(row, row + count, row, [=](float score) { return score * scale; });
  }
  return *std::max_element(row, row + count);
}

template <typename T>
void divide(const float* sums, float by, int64_t width, T* out) {
  const float factor = 1 / by;
  std::transform(sums, sums + width, out, [=](float sum) { return static_cast<T>(sum * factor); });
}

void Attention::store(
    const float* sums, const float* totals, int64_t batch, int64_t head, int64_t first, int64_t count) const {
  const int64_t width = query.width();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = query.row(batch, head, first + i) * width;
    const float* row = sums + i * width;
    switch (out.scalar_type()) {
      case ScalarType::Half:
        divide(row, totals[i], width, out.mutable_data_ptr<executorch::aten::Half>() + at);
        break;
      case ScalarType::BFloat16:
        divide(row, totals[i], width, out.mutable_data_ptr<executorch::aten::BFloat16>() + at);
        break;
      default:
        divide(row, totals[i], width, out.mutable_data_ptr<float>() + at);
    }
  }
}

/// One block of queries of one head, over all keys. Softmax is exact though its largest number becomes known bit by
/// bit: what was summed up is scaled when it grows.
void Attention::run(int64_t task, float* room) const {
  const int64_t width = query.width();
  const int64_t head = task / blocks() % query.heads();
  const int64_t batch = task / blocks() / query.heads();
  const int64_t first = task % blocks() * block;
  const int64_t queries = std::min(block, query.positions() - first);
  const int64_t shared = head / (query.heads() / key.heads()); // the head of keys and values
  float* scores = room;
  float* sums = scores + block * kKeys;
  float* largest = sums + block * width;
  float* totals = largest + block;
  float* of_query = totals + block;
  float* of_keys = of_query + block * width;
  float* of_values = of_keys + kKeys * width;
  std::fill(sums, sums + block * width, 0.0F);
  std::fill(largest, largest + block, kMinusInfinity);
  std::fill(totals, totals + block, 0.0F);

  const Rows asked = rows(query, query.row(batch, head, first), queries, of_query);
  const int64_t seen = causal ? std::min(start + first + queries, keys) : keys;
  for (int64_t n = 0; n < seen; n += kKeys) {
    const int64_t count = std::min(kKeys, keys - n);
    const Rows given = rows(key, key.row(batch, shared, n), count, of_keys);
    executorch::cpublas::gemm(
        TransposeType::Transpose,
        TransposeType::NoTranspose,
        count,
        queries,
        width,
        1,
        given.data,
        given.stride,
        asked.data,
        asked.stride,
        0,
        scores,
        count);
    if (causal) {
      hide_later(scores, first, queries, n, count);
    }
    for (int64_t i = 0; i < queries; ++i) {
      float* row = scores + i * count;
      const float now = std::max(largest[i], weigh(row, first + i, n, count));
      if (now == kMinusInfinity) { // nothing is seen yet
        std::fill(row, row + count, 0.0F);
        continue;
      }
      const float total = exponentials(row, count, now);
      const float before = std::exp(largest[i] - now);
      totals[i] = total + before * totals[i];
      largest[i] = now;
      std::transform(
          sums + i * width, sums + (i + 1) * width, sums + i * width, [=](float sum) { return sum * before; });
    }
    const Rows values = rows(value, value.row(batch, shared, n), count, of_values);
    executorch::cpublas::gemm(
        TransposeType::NoTranspose,
        TransposeType::NoTranspose,
        width,
        queries,
        count,
        1,
        values.data,
        values.stride,
        scores,
        count,
        n == 0 ? 0 : 1,
        sums,
        width);
  }
  store(sums, totals, batch, head, first, queries);
}

bool same_shapes(const Heads& query, const Heads& key, const Heads& value) {
  return key.positions() == value.positions() && key.heads() == value.heads() && key.width() == value.width() &&
      key.width() == query.width() && query.tensor.size(0) == key.tensor.size(0) &&
      key.tensor.size(0) == value.tensor.size(0) && query.heads() % key.heads() == 0 &&
      query.tensor.scalar_type() == key.tensor.scalar_type() && key.tensor.scalar_type() == value.tensor.scalar_type();
}

bool is_mask(const Tensor& mask, int64_t queries, int64_t keys) {
  return mask.dim() == 2 && mask.scalar_type() == ScalarType::Float && mask.size(0) == queries &&
      mask.size(1) == keys && et::is_contiguous_dim_order(mask.dim_order().data(), 2);
}

Tensor& attend(
    Context& context,
    const Heads& query,
    const Heads& key,
    const Heads& value,
    int64_t start,
    const OptionalTensor& mask,
    bool causal,
    std::optional<double> scale,
    Tensor& out) {
  const bool valid = query.valid() && key.valid() && value.valid() && same_shapes(query, key, value);
  ET_KERNEL_CHECK_MSG(context, valid, InvalidArgument, out, "query, keys and values do not fit together");
  const bool inside = start >= 0 && (mask || start <= value.positions() - query.positions());
  ET_KERNEL_CHECK_MSG(context, inside, InvalidArgument, out, "position %lld", static_cast<long long>(start));
  const int64_t keys = mask ? value.positions() : start + query.positions();
  const bool one = !mask || (!causal && is_mask(*mask, query.positions(), keys));
  ET_KERNEL_CHECK_MSG(context, one, InvalidArgument, out, "the mask does not fit");
  const bool quantized = query.tensor.scalar_type() == ScalarType::Char;
  const bool typed = out.scalar_type() == (quantized ? ScalarType::Float : query.tensor.scalar_type());
  ET_KERNEL_CHECK_MSG(context, typed, InvalidArgument, out, "the output has another type");
  ET_KERNEL_CHECK(context, et::resize_tensor(out, query.tensor.sizes()) == et::Error::Ok, InvalidArgument, out);

  const int64_t block = query.positions() >= 768 ? 256 : query.positions() >= 192 ? 64 : 32;
  const float factor = static_cast<float>(scale ? *scale : 1 / std::sqrt(static_cast<double>(query.width())));
  const Attention attention{query, key, value, mask, causal, start, keys, block, factor, out};
  const int64_t tasks = query.tensor.size(0) * query.heads() * attention.blocks();
  const int64_t threads = executorch::extension::get_thread_count();
  const std::unique_ptr<float[]> room(new (std::nothrow) float[threads * attention.room()]);
  ET_KERNEL_CHECK(context, room != nullptr, MemoryAllocationFailed, out);
  executorch::extension::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    float* own = room.get() + executorch::extension::get_thread_num() * attention.room();
    for (int64_t task = begin; task < end; ++task) {
      attention.run(task, own);
    }
  });
  return out;
}

/// What rows of a cache, [batch, position, head, number], are to be replaced by.
bool fits_into(const Tensor& value, const Tensor& cache) {
  return value.dim() == 4 && cache.dim() == 4 && value.size(0) == cache.size(0) && value.size(2) == cache.size(2) &&
      value.size(3) == cache.size(3) && value.scalar_type() == cache.scalar_type() &&
      et::is_contiguous_dim_order(value.dim_order().data(), 4) &&
      et::is_contiguous_dim_order(cache.dim_order().data(), 4);
}

size_t bytes_of_position(const Tensor& tensor) {
  return static_cast<size_t>(tensor.size(2) * tensor.size(3)) * tensor.element_size();
}

void copy_positions(const Tensor& value, int64_t from, Tensor& cache, int64_t to, int64_t batch, int64_t count) {
  const size_t nbytes = bytes_of_position(value);
  const uint8_t* source = static_cast<const uint8_t*>(value.const_data_ptr());
  uint8_t* target = static_cast<uint8_t*>(cache.mutable_data_ptr());
  std::memcpy(
      target + (batch * cache.size(1) + to) * nbytes, source + (batch * value.size(1) + from) * nbytes, count * nbytes);
}

Tensor& update_cache(Context& context, const Tensor& value, Tensor& cache, int64_t start, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, fits_into(value, cache), InvalidArgument, out, "the cache has another shape");
  const bool inside = start >= 0 && start <= cache.size(1) - value.size(1);
  ET_KERNEL_CHECK_MSG(context, inside, InvalidArgument, out, "position %lld", static_cast<long long>(start));
  for (int64_t batch = 0; batch < value.size(0); ++batch) {
    copy_positions(value, 0, cache, start, batch, value.size(1));
  }
  return out;
}

Tensor& update_cache_with_indices(
    Context& context, const Tensor& value, Tensor& cache, int64_t, const Tensor& indices, Tensor& out) {
  ET_KERNEL_CHECK_MSG(context, fits_into(value, cache), InvalidArgument, out, "the cache has another shape");
  const bool valid = indices.dim() == 2 && indices.scalar_type() == ScalarType::Long &&
      indices.size(0) == value.size(0) && indices.size(1) == value.size(1) &&
      et::is_contiguous_dim_order(indices.dim_order().data(), 2);
  ET_KERNEL_CHECK_MSG(context, valid, InvalidArgument, out, "an index for each position is needed");
  const int64_t* data = indices.const_data_ptr<int64_t>();
  const bool inside = std::all_of(data, data + indices.numel(), [&](int64_t i) { return i >= 0 && i < cache.size(1); });
  ET_KERNEL_CHECK_MSG(context, inside, InvalidArgument, out, "an index is out of range");
  for (int64_t i = 0; i < indices.numel(); ++i) {
    copy_positions(value, i % value.size(1), cache, data[i], i / value.size(1), 1);
  }
  return out;
}

Tensor& custom_sdpa(
    Context& context,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    int64_t start,
    OptionalTensor mask,
    double /*dropout*/,
    bool causal,
    std::optional<double> scale,
    Tensor& out) {
  const auto heads = [](const Tensor& tensor) { return Heads{tensor, {}, {}, false}; };
  return attend(context, heads(query), heads(key), heads(value), start, mask, causal, scale, out);
}

Tensor& custom_quantized_sdpa(
    Context& context,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    int64_t start,
    OptionalTensor mask,
    double /*dropout*/,
    bool causal,
    std::optional<double> scale,
    OptionalTensor query_zeros,
    OptionalTensor query_scales,
    OptionalTensor key_zeros,
    OptionalTensor key_scales,
    OptionalTensor value_zeros,
    OptionalTensor value_scales,
    bool position_last,
    Tensor& out) {
  const Heads asked{query, query_zeros, query_scales, position_last};
  const Heads given{key, key_zeros, key_scales, position_last};
  const Heads values{value, value_zeros, value_scales, position_last};
  return attend(context, asked, given, values, start, mask, causal, scale, out);
}

Tensor& sdpa_with_kv_cache(
    Context& context,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    Tensor& key_cache,
    Tensor& value_cache,
    int64_t start,
    int64_t /*length*/,
    OptionalTensor mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    Tensor& out) {
  update_cache(context, key, key_cache, start, out);
  update_cache(context, value, value_cache, start, out);
  if (context.failure_state() != et::Error::Ok) {
    return out;
  }
  return custom_sdpa(context, query, key_cache, value_cache, start, mask, dropout, causal, scale, out);
}

#define BLOBSTORE_KERNEL(function) \
  executorch::extension::make_boxed_kernel("llama::" #function ".out", EXECUTORCH_FN(function, kName_##function))
#define BLOBSTORE_NAME(function) constexpr char kName_##function[] = "llama::" #function ".out"

BLOBSTORE_NAME(custom_quantized_sdpa);
BLOBSTORE_NAME(custom_sdpa);
BLOBSTORE_NAME(sdpa_with_kv_cache);
BLOBSTORE_NAME(update_cache);
BLOBSTORE_NAME(update_cache_with_indices);

} // namespace

void add_llm_kernels() {
  static const std::array kernels{
      BLOBSTORE_KERNEL(custom_quantized_sdpa),
      BLOBSTORE_KERNEL(custom_sdpa),
      BLOBSTORE_KERNEL(sdpa_with_kv_cache),
      BLOBSTORE_KERNEL(update_cache),
      BLOBSTORE_KERNEL(update_cache_with_indices),
  };
  internal::spare_kernels = {kernels.data(), kernels.size()};
}

} // namespace blobstore::python
