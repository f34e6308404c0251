// What the rest of this room needs of an adapter's file.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/adapters.h>

#include "adapters/lora_names.h"
#include "adapters/peft_folder.h"
#include "format/ptd_file.h"
#include "format/tensor_view.h"
#include "logical/updates.h"

namespace blobstore::internal {

/// Tensors by name. The caller keeps their bytes.
using NamedViews = std::vector<std::pair<std::string, TensorView>>;

} // namespace blobstore::internal

namespace blobstore {

struct Adapter::Impl {
  explicit Impl(const std::string& path);
  /// As PEFT saves it. @param named the tensors. @param factors by name.
  Impl(
      std::string path,
      std::shared_ptr<const internal::PeftFolder> folder,
      const internal::NamedViews& named,
      std::map<std::string, double> factors);

  /// The size of its blobs.
  uint64_t nbytes() const;
  /// @throws Error Integrity: a blob is damaged; FileAccess: a file was truncated.
  void check_unchanged() const;
  /// What the product of a pair must be multiplied with, beside the scale. @param b the name of its lora_b.
  double factor(const std::string& b) const;
  /// The file of a data file. @throws Error Adapter: it is a folder of PEFT.
  const internal::PtdFile& data_file() const;

  std::string name;
  std::unique_ptr<const internal::PtdFile> file; // these two are empty for a folder of PEFT
  std::optional<internal::Updates> updates; // of the file, for reading only
  std::shared_ptr<const internal::PeftFolder> peft; // these three are empty for a file
  std::map<std::string, internal::TensorView, std::less<>> values;
  std::map<std::string, double> factors;
  std::optional<std::string> foundation;
  std::optional<double> scale;
  std::map<std::string, std::string> metadata; // without these two
  std::vector<NamedTensor> tensors;
  std::vector<LoraPair> pairs;
  std::vector<Error> unpaired; // for each module without a valid pair

 private:
  void find_pairs();
};

} // namespace blobstore

namespace blobstore::internal {

/// Lets this room and the Python module see what an adapter is made of.
struct AdapterAccess {
  static const Adapter::Impl& impl(const Adapter& adapter) { return *adapter.impl_; }
  /// An adapter of PEFT whose tensors have these names.
  static std::shared_ptr<const Adapter> of_peft(
      std::string path,
      std::shared_ptr<const PeftFolder> folder,
      const NamedViews& named,
      std::map<std::string, double> factors);
  /// A tensor in the dtype that it is stored in.
  /// @throws Error Layout: a record and the layout of a key describe it differently. Or what `Updates::value` throws.
  static TensorView stored(const Adapter::Impl& impl, const NamedTensor& tensor);
  /// A tensor in the model's dtype: a view of the adapter's memory, or memory of its own.
  /// @throws Error KeyNotFound, Update, as `Adapter::tensor`. Layout, as `stored`. UnsupportedData: it has no numbers.
  static TensorView value(const Adapter& adapter, std::string_view name);
};

/// The scale in the metadata of a file; empty if it has none. @throws Error InvalidFile: it is not a finite number.
std::optional<double> recorded_scale(const PtdFile& file);

/// @throws Error Adapter: the number is not finite. @param what what the message calls it.
double check_scale(double number, const char* what);

/// A number for a message, as Python writes it.
std::string number_text(double number);

/// Tensors in row-major order. They refer to the caller's memory. @throws Error UnsupportedData: one is not of numbers.
NamedViews views_of(const StateDict& tensors);

/// An error for each of these tensors that has infinities or NaN.
std::vector<Error> not_finite(const std::string& origin, const NamedViews& tensors);

/// What is wrong with tensors that are to become an adapter.
std::vector<Error> adapter_problems(const std::string& origin, const NamedViews& tensors);

/// The names and shapes of tensors.
std::vector<NameAndSizes> shapes_of(const std::vector<NamedTensor>& tensors);
std::vector<NameAndSizes> shapes_of(const NamedViews& tensors);

/// Throw the first problem, if there is one.
void raise_first(const std::vector<Error>& problems);

/// The pairs among tensors, each of which must belong to one.
/// @param otherwise what cannot be done if some do not, as the message says it.
/// @throws Error Adapter or Layout.
std::vector<LoraPair> only_pairs(
    const std::vector<NameAndSizes>& tensors, const std::string& origin, const char* otherwise);

} // namespace blobstore::internal
