// What examples/llm/app.cpp needs of its platform: a runner and a tokenizer of letters, and a downloader for servers on
// this machine.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "letter_runner.h"

using TextRunner = LetterRunner;

/// A runner of the program of a release. @param files the folder of the release; it ends with a separator.
inline std::shared_ptr<TextRunner> make_runner(const std::string& files) {
  return std::make_shared<LetterRunner>(files + "model.pte", files + "foundation.ptd");
}

/// The tokens of a text, by the tokenizer of a release.
inline std::vector<int64_t> encode(const std::string& /* files */, const std::string& text) {
  return LetterRunner::encode(text);
}

/// The answer of http://127.0.0.1:PORT/PATH to a request, with its headers.
inline std::string answer_of(const std::string& url, const std::string& range) {
  const std::string machine = "http://127.0.0.1:";
  const size_t path = url.find('/', machine.size());
  if (url.rfind(machine, 0) != 0 || path == std::string::npos) {
    throw std::runtime_error(url + " is not on this machine");
  }
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(url.c_str() + machine.size())));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string request =
      "GET " + url.substr(path) + " HTTP/1.0\r\n" + (range.empty() ? "" : "Range: " + range + "\r\n") + "\r\n";
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  std::string answer;
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      send(connection, request.data(), request.size(), 0) == static_cast<ssize_t>(request.size())) {
    std::vector<char> piece(1 << 16);
    for (ssize_t size = 0; (size = recv(connection, piece.data(), piece.size(), 0)) > 0;) {
      answer.append(piece.data(), static_cast<size_t>(size));
    }
  }
  close(connection);
  return answer;
}

/// Fetch a file. @param range the value of the header; empty for the whole file.
inline void download(const std::string& url, const std::string& range, const std::string& file) {
  const std::string answer = answer_of(url, range);
  const std::string status = answer.substr(0, answer.find('\r'));
  const size_t body = answer.find("\r\n\r\n");
  if (status.find(" 200 ") == std::string::npos && status.find(" 206 ") == std::string::npos) {
    throw std::runtime_error(url + ": " + status);
  }
  std::ofstream(file, std::ios::binary) << answer.substr(body + 4);
}
