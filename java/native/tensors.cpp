// LogicalTensors in Java.
#include <blobstore/tensors.h>

#include "crossing.h"

namespace blobstore::java {

template <>
struct Mirror<LogicalTensor> {
  static constexpr const char* name = "LogicalTensor";
  static auto fields(const LogicalTensor& tensor) {
    return std::make_tuple(
        tensor.name,
        tensor.scalar_type,
        tensor.sizes,
        tensor.aliases,
        tensor.keys,
        tensor.needs,
        tensor.refusal,
        tensor.auxiliary);
  }
};

namespace {

std::shared_ptr<LogicalTensors> open(const std::shared_ptr<BlobCache>& cache) {
  return std::make_shared<LogicalTensors>(cache);
}

LogicalTensor at(const LogicalTensors& tensors, std::string_view name) {
  LogicalTensor found = tensors.at(name);
  if (item_size(found.scalar_type) == 0) { // records are not checked for that
    throw Error(ErrorKind::UnsupportedData, "'" + found.name + "' has elements of an unknown type");
  }
  return found;
}

NewTensor value(JNIEnv* env, const LogicalTensors& tensors, std::string_view name) {
  return copy_to_java(env, *tensors.value(name));
}

Updated update_file(const LogicalTensors& tensors, const Path& path, bool strict, bool finite) {
  return tensors.update_state_dict(load_state_dict(path.text), strict, finite);
}

} // namespace

std::vector<Row> tensor_rows() {
  return {
      row<&open>("openTensors"),
      row<&LogicalTensors::names>("tensorNames"),
      row<&LogicalTensors::contains>("tensorContains"),
      row<&at>("tensorAt"),
      row<&value>("tensorValue"),
      row<&LogicalTensors::update>("tensorUpdate"),
      row<&LogicalTensors::update_state_dict>("tensorUpdateStateDict"),
      row<&update_file>("tensorUpdateFile")};
}

} // namespace blobstore::java
