// Runs one method of a program with the stock executorch::extension::Module.
//
//   module_runner PROGRAM METHOD [--data FILE.ptd]... [--input FILE TYPE SIZES]... [--output PREFIX] [--named-data KEY]
//
// With --named-data, it writes what the application finds under KEY in Program::get_named_data_map() to PREFIX, and
// runs nothing. Otherwise: TYPE is the number of an ExecuTorch scalar type, SIZES are joined by 'x' ("2x3"; "" for a
// scalar), and FILE holds the elements in row-major order. Each output tensor is written to PREFIX<index>.bin as it
// lies in memory, and described by one line on standard output: scalar type, sizes, dimension order, each joined by
// 'x'. The exit code is ExecuTorch's error number, or 64 for wrong arguments, or 65 for a file that cannot be used.

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>

namespace {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Program;

constexpr int kWrongArguments = 64;
constexpr int kUnusableFile = 65;

[[noreturn]] void fail(int code, const std::string& message) {
  std::cerr << "module_runner: " << message << std::endl;
  std::exit(code);
}

[[noreturn]] void fail(Error error, const std::string& step) {
  fail(static_cast<int>(error), step + ": error " + std::to_string(static_cast<int>(error)));
}

std::vector<int32_t> parse_sizes(const std::string& text) {
  std::vector<int32_t> sizes;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, 'x');) {
    sizes.push_back(std::stoi(part));
  }
  return sizes;
}

std::vector<uint8_t> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    fail(kUnusableFile, path + ": cannot be read");
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
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
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 2) {
    fail(kWrongArguments, "PROGRAM and METHOD are needed");
  }
  const std::string& program = arguments[0];
  const std::string& method = arguments[1];
  std::vector<std::string> data_files;
  std::vector<TensorPtr> tensors;
  std::string prefix;
  std::string key;

  for (size_t i = 2; i < arguments.size();) {
    const std::string& option = arguments[i];
    const size_t left = arguments.size() - i - 1;
    if (option == "--data" && left >= 1) {
      data_files.push_back(arguments[i + 1]);
      i += 2;
    } else if (option == "--output" && left >= 1) {
      prefix = arguments[i + 1];
      i += 2;
    } else if (option == "--named-data" && left >= 1) {
      key = arguments[i + 1];
      i += 2;
    } else if (option == "--input" && left >= 3) {
      tensors.push_back(
          executorch::extension::make_tensor_ptr(
              parse_sizes(arguments[i + 3]),
              read_file(arguments[i + 1]),
              {},
              {},
              static_cast<ScalarType>(std::stoi(arguments[i + 2]))));
      i += 4;
    } else {
      fail(kWrongArguments, "unknown or incomplete option " + option);
    }
  }

  Module module(program, data_files, Module::LoadMode::Mmap);
  if (const Error error = module.load(Program::Verification::InternalConsistency); error != Error::Ok) {
    fail(error, "load");
  }
  if (!key.empty()) {
    const auto map = module.program()->get_named_data_map();
    if (!map.ok()) {
      fail(map.error(), "get_named_data_map");
    }
    const auto data = map.get()->get_data(key);
    if (!data.ok()) {
      fail(data.error(), "get_data");
    }
    std::ofstream file(prefix, std::ios::binary);
    file.write(static_cast<const char*>(data->data()), static_cast<std::streamsize>(data->size()));
    return file.flush() ? 0 : kUnusableFile;
  }
  if (const Error error = module.load_method(method); error != Error::Ok) {
    fail(error, "load_method");
  }
  const auto outputs = module.execute(method, std::vector<EValue>(tensors.begin(), tensors.end()));
  if (!outputs.ok()) {
    fail(outputs.error(), "execute");
  }

  size_t index = 0;
  for (const EValue& value : outputs.get()) {
    if (!value.isTensor()) {
      fail(kUnusableFile, "output " + std::to_string(index) + " is not a tensor");
    }
    const auto& tensor = value.toTensor();
    std::ofstream file(prefix + std::to_string(index) + ".bin", std::ios::binary);
    file.write(tensor.const_data_ptr<char>(), static_cast<std::streamsize>(tensor.nbytes()));
    if (!file.flush()) {
      fail(kUnusableFile, prefix + ": cannot be written");
    }
    std::cout << static_cast<int>(tensor.scalar_type()) << ' ' << join(tensor.sizes()) << ' '
              << join(tensor.dim_order()) << std::endl;
    ++index;
  }
  return 0;
}
