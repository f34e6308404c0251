/* Frames of zstd, whole, from memory to memory. The decoder of zstd is compiled in, and none of its names is visible, so an
 * application may link a zstd of its own. */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Decode one frame, which must fill `stored` and give `size` bytes; what its head promises is compared with that before
 * memory is taken. Returns whether that is so; otherwise `out` has any bytes. */
int blobstore_decode_frame(void* out, size_t size, const void* stored, size_t stored_size);

#ifdef __cplusplus
}
#endif
