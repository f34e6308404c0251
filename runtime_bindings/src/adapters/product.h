// The arithmetic of merging.
#pragma once

#include <cstddef>

namespace blobstore::internal {

/// `weight[i][j] += factor * sum over k of b[i][k] * a[k][j]`, where the sum is taken first, by ascending k.
///
/// Every operation is rounded on its own, so the result is the same on every machine. All matrices are dense and in
/// row-major order: `weight` is (rows, columns), `b` (rows, rank), `a` (rank, columns).
void add_product(float* weight, float factor, const float* b, const float* a, size_t rows, size_t rank, size_t columns);
void add_product(
    double* weight, double factor, const double* b, const double* a, size_t rows, size_t rank, size_t columns);

} // namespace blobstore::internal
