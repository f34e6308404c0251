"""The C++ of the pages and headers compiles, and what pages take from an example stands in it (X2, N1)."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_code import blocks, pages
from tests.helpers.native_build import LIBRARY, ROOT, missing

# What the pages leave to the reader; a block's own variables hide these.
BEFORE = """
#include <array>
#include <cstring>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <blobstore/adapters.h>
#include <blobstore/delegate.h>
#include <blobstore/nothrow.h>
#include <blobstore/releases.h>
#include <blobstore/runners.h>
#include <blobstore_backend.h>

namespace et = executorch::runtime;
struct Tokenizer {};
namespace executorch::extension::llm { // the wheel does not have these headers
struct GenerationConfig {
  bool echo;
  int32_t num_bos, num_eos;
};
struct TextLLMRunner {
  et::Error load();
  et::Error generate(const std::string&, const GenerationConfig&, std::function<void(const std::string&)>);
  void reset();
  void stop();
};
std::unique_ptr<TextLLMRunner> create_text_llm_runner(
    const std::string&, std::unique_ptr<Tokenizer>, const std::string&);
std::unique_ptr<Tokenizer> load_tokenizer(const std::string&);
} // namespace executorch::extension::llm
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;

extern const char *program, *weights, *name;
extern const char** argv;
extern const std::string trusted_digest, server, INDEX;
extern const std::vector<float> inputs;
extern const std::vector<int64_t> labels;
extern const std::shared_ptr<blobstore::BlobCache> cache, serving_cache;
extern const blobstore::LogicalTensors &tensors, &plain;
extern const executorch::extension::TensorPtr tokens, position;
extern std::unique_ptr<Tokenizer> tokenizer;
extern std::unique_ptr<executorch::extension::llm::TextLLMRunner> runner;
extern const std::shared_ptr<blobstore::BlobCache> foundation;
extern const executorch::extension::llm::GenerationConfig config;
void log(const char*);
void open_again(const std::vector<std::string>& reasons);
void download(const std::string& url, const std::string& range, const std::string& file);
"""


def excerpts() -> list[str]:
    """The C++ of the pages that is not a whole file, and the examples at the top of the headers, each with its place."""
    found = []
    for page in pages():
        for block in blocks(ROOT / page):
            if block.language == "cpp" and block.title is None:
                found.append(f'#line {block.line} "{page}"\n{block.code}')
    for header in sorted((LIBRARY / "include" / "blobstore").glob("*.h")):
        top = re.match(r"(?://.*\n)*", header.read_text(encoding="utf-8"))
        lines = re.findall(r"^//   (.*)$", top[0] if top else "", re.MULTILINE)
        found.append(f'#line 1 "{header.name}"\n' + "\n".join(lines))
    return found


def compiled(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "pages.cpp"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.find_spec("executorch")
    assert spec and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "include"
    theirs = [include, include / "executorch/runtime/core/portable_type/c10"]
    options = ["-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused", "-DC10_USING_CUSTOM_GENERATED_MACROS"]
    command = [os.environ.get("CXX", "c++"), *options, *(f"-isystem{folder}" for folder in theirs)]
    command += [f"-I{LIBRARY / 'include'}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_excerpts_compile(tmp_path: Path) -> None:
    """Each as the body of a function; errors name the page and the line."""
    if reason := missing():
        pytest.skip(reason)
    codes = [re.sub(r"^#include .*$", "", code, flags=re.MULTILINE) for code in excerpts()]
    functions = [f"void block_{number}() {{\n{code}\n}}\n" for number, code in enumerate(codes)]
    done = compiled(BEFORE + "\n".join(functions), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is not a member" in compiled(f"{BEFORE}\nvoid block() {{ blobstore::nothing(); }}", tmp_path).stderr


def test_excerpts_of_examples_stand_in_them() -> None:
    """Each part of a block after a comment that names the example."""
    found = 0
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        for example, code in re.findall(r"<!-- from (\S+) -->\n+```(?:cpp|java)\n(.*?)```", text, re.DOTALL):
            source = re.sub(r"\s+", " ", (ROOT / example).read_text(encoding="utf-8"))
            for part in code.strip().split("\n\n"):
                found += 1
                assert re.sub(r"\s+", " ", part.strip()) in source, f"{page}: {part}"
    assert found > 3
