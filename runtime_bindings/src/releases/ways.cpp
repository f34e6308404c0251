#include "releases/ways.h"

#include <string_view>
#include <utility>

#include "codec/zstd.h"
#include "format/constants.h"
#include "releases/fields.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMostObjects = 100'000;
constexpr size_t kMostWays = 64;
constexpr uint64_t kMostBase = uint64_t{1} << 31;
constexpr std::string_view kMagic = "\x28\xb5\x2f\xfd"; // of a zstd frame
constexpr int kDeepest = 8; // how many differences may follow each other

bool is_encoding(std::string_view text) {
  return !text.empty() && text.size() <= 40 &&
      text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789:+") == std::string_view::npos;
}

/// A way, and what it is a way to, until all contents are known.
struct ReadWay {
  std::string encoding;
  ReleaseWay way;
};

ReadWay read_way(Fields& fields) {
  ReadWay found;
  fields.tuple("a way", 4, kAnyNumber, [&](size_t position) {
    if (position == 0) {
      found.encoding = fields.text("an encoding", is_encoding);
    } else if (position == 1) {
      found.way.object = static_cast<uint32_t>(fields.number("the number of an object", 0, kMostObjects));
    } else if (position == 2) {
      found.way.at = fields.number("a place");
    } else if (position == 3) {
      found.way.stored = fields.number("a size");
    } else if (position == 4) {
      if (!fields.json.take_literal("-1")) {
        found.way.base = fields.number("the number of a base", 0, kMostBase);
      }
    } else {
      fields.json.skip();
    }
  });
  return found;
}

bool is_sound(const ReadWay& one, size_t content, const ReleaseWays& ways) {
  const ReleaseWay& way = one.way;
  const uint64_t size = ways.contents[content].size;
  return way.object < ways.objects.size() && way.at + way.stored <= ways.objects[way.object].size &&
      (!way.base ||
       (*way.base < ways.contents.size() && ways.contents[*way.base].size == size && *way.base != content)) &&
      (one.encoding != "raw" || way.stored == size);
}

/// Check the ways of a content, and leave out those that cannot be decoded here.
std::vector<ReleaseWay> checked(const std::vector<ReadWay>& listed, size_t content, const ReleaseWays& ways) {
  std::vector<ReleaseWay> found;
  for (const ReadWay& one : listed) {
    if (!is_sound(one, content, ways)) {
      throw_format_error(
          "content {} cannot travel as '{}': this way refers to bytes that are not there", content, one.encoding);
    }
    const std::optional<Encoding> encoding = read_encoding(one.encoding);
    if (encoding && (encoding->kind == Encoding::Kind::Near) == one.way.base.has_value()) {
      found.push_back(one.way);
      found.back().encoding = *encoding;
    }
  }
  return found;
}

ReleaseWays parse_ways(const std::string& bytes, const std::string& index, const ReleaseParts& parts) {
  ReleaseWays found;
  found.contents = parts.contents;
  std::string of;
  std::vector<std::vector<ReadWay>> listed;
  Fields fields(bytes);
  fields.object("the list", "format index objects bases ways ", [&](const std::string& key) {
    if (key == "format") {
      fields.format_is("blobstore.ways.1");
    } else if (key == "index") {
      of = fields.text("a SHA-256", is_sha256);
    } else if (key == "objects") {
      fields.array(
          "the list of objects", kMostObjects, [&](size_t) { found.objects.push_back(fields.content("an object")); });
    } else if (key == "bases") {
      fields.array("the list of bases", kAnyNumber, [&](size_t) {
        ReleaseObject& base = found.contents.emplace_back();
        fields.tuple("a base", 2, 2, [&](size_t position) {
          if (position == 0) {
            base.sha256 = fields.text("a SHA-256", is_sha256);
          } else {
            base.size = fields.number("a size");
          }
        });
      });
    } else if (key == "ways") {
      fields.array("the list of ways", kAnyNumber, [&](size_t) {
        std::vector<ReadWay>& ways = listed.emplace_back();
        fields.array("the ways to a content", kMostWays, [&](size_t) { ways.push_back(read_way(fields)); });
      });
    } else {
      return false;
    }
    return true;
  });
  fields.json.end();
  if (of != index) {
    throw_format_error("expected the ways of the index sha256:{}, found those of {}", index, of);
  }
  if (listed.size() != found.contents.size()) {
    throw_format_error("expected the ways of {} contents, found those of {}", found.contents.size(), listed.size());
  }
  for (size_t content = 0; content < listed.size(); ++content) {
    found.ways.push_back(checked(listed[content], content, found));
  }
  return found;
}

/// The JSON in a zstd frame; what is no frame is JSON already.
std::string unframed(const std::string& bytes) {
  if (bytes.compare(0, kMagic.size(), kMagic) != 0) {
    return bytes;
  }
  const auto* const frame = reinterpret_cast<const uint8_t*>(bytes.data());
  const uint64_t size = size_in_frame(frame, bytes.size());
  if (size > kTableLimit) {
    throw_format_error("it says that it has {} bytes, at most {} are possible", size, kTableLimit);
  }
  std::string text(static_cast<size_t>(size), '\0');
  Decompressor().decompress(frame, bytes.size(), reinterpret_cast<uint8_t*>(text.data()), text.size());
  return text;
}

} // namespace

ReleaseWays read_ways(
    const std::string& bytes, const std::string& index, const ReleaseParts& parts, const std::string& where) {
  constexpr const char* kWhat = "a list of the ways to the contents";
  const std::string text = in_file(std::string(), where, kWhat, [&] { return unframed(bytes); });
  return in_file(text, where, kWhat, [&] { return parse_ways(text, index, parts); });
}

std::vector<std::optional<Route>> cheapest(
    const std::vector<std::vector<ReleaseWay>>& ways, const std::vector<bool>& here) {
  std::vector<std::optional<Route>> best(ways.size());
  std::vector<std::pair<size_t, const ReleaseWay*>> differences;
  for (size_t content = 0; content < ways.size(); ++content) {
    if (here[content]) {
      best[content] = Route{};
      continue;
    }
    for (const ReleaseWay& way : ways[content]) {
      if (way.base) {
        differences.emplace_back(content, &way);
      } else if (!best[content] || way.stored < best[content]->cost) {
        best[content] = Route{way.stored, &way};
      }
    }
  }
  bool changed = true;
  for (int depth = 0; depth < kDeepest && changed; ++depth) { // each round makes chains longer by one
    const std::vector<std::optional<Route>> known = best;
    changed = false;
    for (const auto& [content, way] : differences) {
      const std::optional<Route>& base = known[*way->base];
      if (base && (!best[content] || way->stored + base->cost < best[content]->cost)) {
        best[content] = Route{way->stored + base->cost, way};
        changed = true;
      }
    }
  }
  return best;
}

} // namespace blobstore::internal
