// What the C++ tests say when something is not as it should be.
#pragma once

#include <cstdio>
#include <cstdlib>

/// End the process unless a condition holds; at once, because other threads may run.
inline void check(bool ok, const char* what, const char* file, int line) {
  if (!ok) {
    std::fprintf(stderr, "%s:%d, failed: %s\n", file, line, what);
    std::_Exit(1);
  }
}
#define CHECK(condition) check(condition, #condition, __FILE__, __LINE__)
