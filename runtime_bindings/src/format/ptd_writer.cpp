#include "format/ptd_writer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/ptd_encoding.h"
#include "format/ptd_manifest.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr uint64_t kMaxAlignment = uint64_t{1} << 30; // of a blob, and the largest common multiple; bounds the padding
constexpr size_t kPiece = size_t{1} << 18; // stays in the processor's cache

void check_alignment(std::string_view key, uint64_t alignment) {
  if (alignment == 0 || alignment > kMaxAlignment) {
    throw_error(
        ErrorKind::InvalidAlignment,
        "key '{}': alignment must be an integer in 1..{}, got {}",
        key,
        kMaxAlignment,
        alignment);
  }
}

/// The least common multiple; numbers above the limit are refused when the file is written, and do not grow until then.
uint64_t common(uint64_t a, uint64_t b) {
  return a > kMaxAlignment ? a : b > kMaxAlignment ? b : std::lcm(a, b);
}

void check_key(std::string_view key) {
  if (key.empty()) {
    throw_error(ErrorKind::InvalidKey, "a key must be a non-empty string, got ''");
  }
  if (key.find('\0') != std::string_view::npos) {
    throw_error(ErrorKind::InvalidKey, "key '{}' contains a NUL character", key);
  }
}

void pad(OutputFile& file, uint64_t size, Hasher* hasher = nullptr) {
  const std::vector<uint8_t> zeros(static_cast<size_t>(std::min<uint64_t>(size, kPiece)), 0);
  for (uint64_t done = 0; done < size; done += kPiece) {
    const auto now = static_cast<size_t>(std::min<uint64_t>(size - done, kPiece));
    file.write(zeros.data(), now);
    if (hasher != nullptr) {
      hasher->update(zeros.data(), now);
    }
  }
}

} // namespace

PtdWriter::PtdWriter(bool share, std::function<void()> check_sources)
    : share_(share), check_sources_(std::move(check_sources)) {}

void PtdWriter::add(
    std::string_view key, const std::optional<Layout>& layout, uint32_t alignment, const uint8_t* data, size_t size) {
  check_alignment(key, alignment);
  check_sources_();
  check_key(key);
  const uint32_t blob = find_or_add({data, size, digest(data, size), kSegmentAlignment, key});
  blobs_[blob].alignment = common(blobs_[blob].alignment, alignment);
  keys_.push_back({key, &layout, alignment, blob});
}

void PtdWriter::align(size_t number, uint32_t alignment) {
  Key& key = keys_[number];
  check_alignment(key.key, alignment);
  const uint64_t both = common(key.alignment, alignment);
  check_alignment(key.key, both);
  key.alignment = static_cast<uint32_t>(both);
  blobs_[key.blob].alignment = common(blobs_[key.blob].alignment, both);
}

uint32_t PtdWriter::find_or_add(const Blob& blob) {
  if (share_) {
    const auto [first, last] = by_digest_.equal_range(blob.digest);
    for (auto known = first; known != last; ++known) {
      const Blob& other = blobs_[known->second];
      check_sources_();
      if (other.size == blob.size && std::equal(blob.data, blob.data + blob.size, other.data)) {
        return known->second;
      }
    }
  }
  blobs_.push_back(blob);
  const auto number = static_cast<uint32_t>(blobs_.size() - 1);
  if (share_) {
    by_digest_.emplace(blob.digest, number);
  }
  return number;
}

uint64_t PtdWriter::write(OutputFile& file, const std::map<std::string, std::string>& metadata) const {
  uint64_t base_alignment = kSegmentAlignment;
  std::vector<TableSegment> segments;
  std::vector<Digest> digests;
  uint64_t end = 0;
  for (const Blob& blob : blobs_) {
    base_alignment = common(base_alignment, blob.alignment);
    if (base_alignment > kMaxAlignment) {
      refuse_alignments();
    }
    segments.push_back({align_up(end, blob.alignment), blob.size});
    digests.push_back(blob.digest);
    end = segments.back().offset + blob.size;
  }
  std::vector<TableKey> keys;
  std::vector<uint32_t> alignments;
  std::map<size_t, std::optional<Layout>> stand_ins; // by size
  std::vector<uint32_t> opaque;
  for (const Key& key : keys_) {
    const std::optional<Layout>* layout = key.layout;
    if (!*layout) {
      const size_t size = blobs_[key.blob].size;
      layout = &stand_ins.try_emplace(size, stand_in(size)).first->second;
      if (*layout) {
        opaque.push_back(static_cast<uint32_t>(keys.size()));
      }
    }
    keys.push_back({key.key, key.blob, layout});
    alignments.push_back(key.alignment);
  }
  std::vector<uint8_t> head = encode_table(keys, segments);
  const uint64_t base = align_up(head.size(), base_alignment);
  encode_header(head, base, end);
  file.write(head.data(), head.size());
  Hasher hasher;
  hasher.update(head.data(), head.size());
  pad(file, base - head.size(), &hasher);

  std::vector<uint8_t> piece(kPiece);
  uint64_t position = 0;
  for (size_t i = 0; i < blobs_.size(); ++i) {
    pad(file, segments[i].offset - position);
    copy(file, blobs_[i], piece);
    position = segments[i].offset + blobs_[i].size;
  }
  const std::vector<uint8_t> manifest = encode_manifest(hasher.digest(), digests, alignments, metadata, opaque);
  file.write(manifest.data(), manifest.size());
  return base + end + manifest.size();
}

/// What is hashed is what is written: a copy of each piece, made right after the sources were checked, and never while
/// the disk is waited for, when they may be truncated.
void PtdWriter::copy(OutputFile& file, const Blob& blob, std::vector<uint8_t>& piece) const {
  Hasher hasher;
  for (size_t done = 0; done < blob.size;) {
    const size_t now = std::min(piece.size(), blob.size - done);
    check_sources_();
    std::memcpy(piece.data(), blob.data + done, now);
    hasher.update(piece.data(), now);
    file.write(piece.data(), now);
    done += now;
  }
  if (const Digest found = hasher.digest(); found != blob.digest) {
    throw_error(
        ErrorKind::DataChanged,
        "the bytes of '{}' changed after they were added: expected xxh3-128 {}, found {}",
        blob.key,
        to_string(blob.digest),
        to_string(found));
  }
}

void PtdWriter::refuse_alignments() const {
  std::set<uint64_t> all;
  for (const Blob& blob : blobs_) {
    all.insert(blob.alignment);
  }
  const std::string text = joined(all, ", ", [](uint64_t alignment) { return std::to_string(alignment); });
  throw_error(ErrorKind::InvalidAlignment, "the alignments [{}] have a common multiple above {}", text, kMaxAlignment);
}

} // namespace blobstore::internal
