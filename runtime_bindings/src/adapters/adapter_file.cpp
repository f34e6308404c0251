#include "adapters/adapter_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <locale>
#include <set>
#include <sstream>

#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "format/file_kind.h"
#include "format/ptd_writer.h"
#include "logical/dim_order.h"
#include "logical/numbers.h"
#include "logical/reorder.h"
#include "logical/tensor_over.h"
#include "os/folders.h"
#include "os/output_file.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

using namespace internal;
namespace {

[[noreturn]] void throw_malformed(const PtdFile& file, const std::string& reason) {
  throw_error_in(ErrorKind::InvalidFile, file.name(), "the adapter's metadata is malformed: {}", reason);
}

std::optional<std::string> recorded_foundation(const PtdFile& file) {
  const auto found = file.metadata().find(kFoundationKey);
  if (found == file.metadata().end()) {
    return std::nullopt;
  }
  const std::string& text = found->second;
  if (text.size() != 32 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw_malformed(file, format("'{}' is not a fingerprint", text));
  }
  return text;
}

/// Whether all keys are SHA-256, such as those that ExecuTorch's exporter for XNNPACK makes of the bytes.
bool has_digests_as_keys(const PtdFile& file) {
  size_t digests = 0;
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string_view key = file.key(i);
    if (key.size() == 64 && key.find_first_not_of("0123456789abcdef") == std::string_view::npos) {
      ++digests;
    } else if (is_content(key)) {
      return false;
    }
  }
  return digests > 0;
}

} // namespace

Adapter::Impl::Impl(const std::string& path) : name(path), file(std::make_unique<const PtdFile>(path)) {
  file->verify();
  updates.emplace(*file);
  foundation = recorded_foundation(*file);
  scale = recorded_scale(*file);
  metadata = file->metadata();
  tensors = named_tensors(updates->index());
  metadata.erase(kFoundationKey);
  metadata.erase(kScaleKey);
  find_pairs();
  if (pairs.empty() && unpaired.empty()) {
    if (has_digests_as_keys(*file)) {
      throw_error_in(
          ErrorKind::Adapter,
          name,
          "its keys are digests, as ExecuTorch's own exporter makes them, and no names; adapters for its programs are "
          "imported with `blobstore adapters import --program`");
    }
    throw no_adapter(name);
  }
}

Adapter::Impl::Impl(
    std::string path,
    std::shared_ptr<const PeftFolder> folder,
    const NamedViews& named,
    std::map<std::string, double> of_pairs)
    : name(std::move(path)),
      peft(std::move(folder)),
      values(named.begin(), named.end()),
      factors(std::move(of_pairs)),
      scale(peft->scale()) {
  for (const auto& [key, value] : named) {
    tensors.push_back({key, value.scalar_type, value.sizes, value.nbytes, {key}, {}});
  }
  find_pairs();
}

void Adapter::Impl::find_pairs() {
  FoundPairs found = internal::find_pairs(shapes_of(tensors), name);
  pairs = std::move(found.pairs);
  unpaired = std::move(found.problems);
}

uint64_t Adapter::Impl::nbytes() const {
  uint64_t size = file ? content_size(*file) : 0;
  for (const auto& [key, value] : values) {
    size += value.nbytes;
  }
  return size;
}

void Adapter::Impl::check_unchanged() const {
  if (file) {
    file->verify();
  } else {
    peft->check_length();
  }
}

double Adapter::Impl::factor(const std::string& b) const {
  const auto found = factors.find(b);
  return found == factors.end() ? 1 : found->second;
}

const PtdFile& Adapter::Impl::data_file() const {
  if (!file) {
    throw_error_in(ErrorKind::Adapter, name, "this is a folder of PEFT, and no data file; import it first");
  }
  return *file;
}

Adapter::Adapter(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Adapter::~Adapter() = default;

std::shared_ptr<const Adapter> Adapter::read(const std::string& path) {
  if (ends_with(path, ".gguf")) {
    throw_error_in(
        ErrorKind::Adapter, path, "an adapter in GGUF is not read; import the folder of PEFT that it was made of");
  }
  if (!leads_to_folder(path)) {
    return std::shared_ptr<const Adapter>(new Adapter(std::make_shared<const Impl>(path)));
  }
  const auto folder = std::make_shared<const PeftFolder>(path);
  NamedViews tensors;
  std::map<std::string, double> factors;
  for (const PeftPair& pair : folder->pairs()) {
    tensors.emplace_back(pair.a_key, pair.a);
    tensors.emplace_back(pair.b_key, pair.b);
    factors.emplace(pair.b_key, folder->factor(pair));
  }
  return AdapterAccess::of_peft(path, folder, tensors, std::move(factors));
}

const std::string& Adapter::path() const {
  return impl_->name;
}

const std::optional<std::string>& Adapter::foundation() const {
  return impl_->foundation;
}

std::optional<double> Adapter::scale() const {
  return impl_->scale;
}

const std::map<std::string, std::string>& Adapter::metadata() const {
  return impl_->metadata;
}

const std::vector<NamedTensor>& Adapter::tensors() const {
  return impl_->tensors;
}

const std::vector<LoraPair>& Adapter::pairs() const {
  return impl_->pairs;
}

executorch::extension::TensorPtr Adapter::tensor(std::string_view name) const {
  TensorView value = AdapterAccess::value(*this, name);
  if (!value.owner) {
    value.owner = impl_;
  }
  return tensor_over(std::move(value));
}

std::vector<Error> Adapter::problems() const {
  std::vector<Error> found = impl_->unpaired;
  NamedViews values;
  for (const NamedTensor& tensor : impl_->tensors) {
    try {
      values.emplace_back(tensor.name, AdapterAccess::stored(*impl_, tensor));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::Update) { // it is quantized, and integers are finite
        found.push_back(error);
      }
    }
  }
  for (Error& error : not_finite(path(), values)) {
    found.push_back(std::move(error));
  }
  return found;
}

namespace {

uint64_t write_adapter(
    const std::string& path,
    const PtdWriter& writer,
    const std::vector<std::string>& foundation,
    double scale,
    std::map<std::string, std::string> metadata) {
  metadata[kScaleKey] = number_text(scale);
  metadata[kFoundationKey] = foundation_fingerprint(foundation);
  OutputFile file(path);
  const uint64_t size = writer.write(file, metadata);
  file.commit();
  return size;
}

} // namespace

uint64_t save_adapter(
    const std::string& path, const StateDict& tensors, const std::vector<std::string>& foundation, double scale) {
  const NamedViews views = views_of(tensors);
  raise_first(adapter_problems(path, views));
  check_scale(scale, "scale");
  check_data_output(path, foundation);
  PtdWriter writer(/*share=*/true, [] {});
  std::vector<std::optional<Layout>> layouts; // the writer refers to them
  layouts.reserve(views.size());
  for (const auto& [name, view] : views) {
    layouts.push_back(Layout{view.scalar_type, {view.sizes.begin(), view.sizes.end()}, row_major(view.sizes.size())});
    writer.add(name, layouts.back(), 1, view.data, view.nbytes);
  }
  return write_adapter(path, writer, foundation, scale, {});
}

uint64_t bind_adapter(
    const std::string& source,
    const std::string& target,
    const std::vector<std::string>& foundation,
    std::optional<double> scale) {
  const std::shared_ptr<const Adapter> adapter = Adapter::read(source);
  const PtdFile& file = AdapterAccess::impl(*adapter).data_file();
  raise_first(adapter->problems());
  if (!scale && !adapter->scale()) {
    throw_error_in(ErrorKind::Adapter, source, "records no scale; give it as `scale`");
  }
  std::vector<std::string> inputs = foundation;
  inputs.push_back(source);
  check_data_output(target, inputs);
  PtdWriter writer(/*share=*/true, [&] { file.check_length(); });
  for (size_t i = 0; i < file.size(); ++i) {
    const PtdEntry& entry = file.entry(i);
    const SourceBlob blob = file.blob(i);
    writer.add(entry.key, entry.layout, entry.alignment, blob.data, blob.size);
  }
  return write_adapter(
      target, writer, foundation, check_scale(scale ? *scale : *adapter->scale(), "scale"), adapter->metadata());
}

} // namespace blobstore

namespace blobstore::internal {

std::shared_ptr<const Adapter> AdapterAccess::of_peft(
    std::string path,
    std::shared_ptr<const PeftFolder> folder,
    const NamedViews& named,
    std::map<std::string, double> factors) {
  return std::shared_ptr<const Adapter>(new Adapter(
      std::make_shared<const Adapter::Impl>(std::move(path), std::move(folder), named, std::move(factors))));
}

TensorView AdapterAccess::stored(const Adapter::Impl& impl, const NamedTensor& tensor) {
  if (impl.peft) {
    return impl.values.at(tensor.name);
  }
  TensorView value = impl.updates->value(tensor.name);
  if (value.sizes != tensor.sizes) {
    throw_error_in(
        ErrorKind::Layout,
        impl.name,
        "'{}' is {} by its record, but {} by its key",
        tensor.name,
        to_string(tensor.sizes),
        to_string(value.sizes));
  }
  return value;
}

TensorView AdapterAccess::value(const Adapter& adapter, std::string_view name) {
  const Adapter::Impl& impl = *adapter.impl_;
  const auto found = std::find_if(
      impl.tensors.begin(), impl.tensors.end(), [&](const NamedTensor& tensor) { return tensor.name == name; });
  if (found == impl.tensors.end()) {
    throw_error_in(ErrorKind::KeyNotFound, adapter.path(), "no tensor '{}'", name);
  }
  const TensorView value = stored(impl, *found);
  if (!is_number(found->scalar_type)) {
    throw_error_in(
        ErrorKind::UnsupportedData,
        adapter.path(),
        "'{}' has the scalar type {}, which is no number",
        found->name,
        found->scalar_type);
  }
  return cast(value, found->scalar_type);
}

std::optional<double> recorded_scale(const PtdFile& file) {
  const auto found = file.metadata().find(kScaleKey);
  if (found == file.metadata().end()) {
    return std::nullopt;
  }
  const std::string& text = found->second;
  double number = NAN;
  if (!text.empty() && text.find_first_not_of("0123456789+-.eE") == std::string::npos) {
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    if (!(stream >> number) || stream.peek() != std::istringstream::traits_type::eof()) {
      number = NAN;
    }
  }
  if (!std::isfinite(number)) {
    throw_error_in(
        ErrorKind::InvalidFile,
        file.name(),
        "the adapter's metadata is malformed: scale '{}' is not a finite number",
        text);
  }
  return number;
}

double check_scale(double number, const char* what) {
  if (!std::isfinite(number)) {
    throw_error(ErrorKind::Adapter, "{} {} is not a finite number", what, number_text(number));
  }
  return number;
}

std::string number_text(double number) {
  std::string text;
  for (int digits = 1; digits <= 17; ++digits) {
    std::ostringstream stream(std::ios_base::out); // that without arguments is newer than manylinux_2_28
    stream.imbue(std::locale::classic());
    stream.precision(digits);
    stream << number;
    text = stream.str();
    std::istringstream again(text);
    again.imbue(std::locale::classic());
    if (double read = 0; again >> read && read == number) {
      break;
    }
  }
  return std::isfinite(number) && text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

NamedViews views_of(const StateDict& tensors) {
  NamedViews views;
  for (const auto& [name, tensor] : tensors) {
    if (tensor == nullptr || !is_number(static_cast<int8_t>(tensor->scalar_type()))) {
      throw_error(ErrorKind::UnsupportedData, "'{}' is not a tensor of numbers", name);
    }
    const TensorView view{
        static_cast<int8_t>(tensor->scalar_type()),
        {tensor->sizes().begin(), tensor->sizes().end()},
        static_cast<const uint8_t*>(tensor->const_data_ptr()),
        tensor->nbytes(),
        nullptr};
    const std::vector<uint8_t> order = dim_order_of(*tensor);
    views.emplace_back(name, reorder(view, order, row_major(order.size())));
  }
  return views;
}

std::vector<Error> not_finite(const std::string& origin, const NamedViews& tensors) {
  std::vector<Error> found;
  for (const auto& [name, value] : tensors) {
    if (!is_finite(value)) {
      found.emplace_back(ErrorKind::Update, origin, format("'{}' has values that are not finite", name));
    }
  }
  return found;
}

std::vector<Error> adapter_problems(const std::string& origin, const NamedViews& tensors) {
  FoundPairs found = find_pairs(shapes_of(tensors), origin);
  for (Error& error : not_finite(origin, tensors)) {
    found.problems.push_back(std::move(error));
  }
  if (found.pairs.empty()) {
    found.problems.push_back(no_adapter(origin));
  }
  return std::move(found.problems);
}

std::vector<LoraPair> only_pairs(
    const std::vector<NameAndSizes>& tensors, const std::string& origin, const char* otherwise) {
  FoundPairs found = find_pairs(tensors, origin);
  raise_first(found.problems);
  std::set<std::string> others;
  for (const NameAndSizes& tensor : tensors) {
    others.insert(tensor.first);
  }
  for (const LoraPair& pair : found.pairs) {
    others.erase(pair.a);
    others.erase(pair.b);
  }
  if (!others.empty()) {
    throw_error_in(
        ErrorKind::Adapter,
        origin,
        "{} belong to no pair, so {}",
        quoted_names({others.begin(), others.end()}),
        otherwise);
  }
  return std::move(found.pairs);
}

std::vector<NameAndSizes> shapes_of(const std::vector<NamedTensor>& tensors) {
  std::vector<NameAndSizes> shapes;
  for (const NamedTensor& tensor : tensors) {
    shapes.emplace_back(tensor.name, tensor.sizes);
  }
  return shapes;
}

std::vector<NameAndSizes> shapes_of(const NamedViews& tensors) {
  std::vector<NameAndSizes> shapes;
  for (const auto& [name, value] : tensors) {
    shapes.emplace_back(name, value.sizes);
  }
  return shapes;
}

void raise_first(const std::vector<Error>& problems) {
  if (!problems.empty()) {
    throw problems.front();
  }
}

} // namespace blobstore::internal
