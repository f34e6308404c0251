/* The C interface of libblobstore_backend.so: live weights for an application that has ExecuTorch.
 *
 * Loading the library registers BlobStoreBackend with the ExecuTorch of the process. Programs that were lowered for it
 * then load, with their weights from the data files that ExecuTorch is given. These functions let the weights change.
 *
 *   const char* files[] = {"model.ptd"};
 *   blobstore_weights* weights;
 *   if (blobstore_open(files, 1, &weights) != BLOBSTORE_OK) log(blobstore_error());
 *   ... // load the program's methods, by Module or anything else
 *   blobstore_update(weights, "delta.ptd"); // the next call uses it
 *
 * Any thread may call any function. Commit between two calls of one program: ExecuTorch has no lock that spans a call,
 * so its delegates may otherwise use weights of two moments.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns: 0, or one more than the number of the kind in <blobstore/error.h>. These are the usual ones.
 */
enum blobstore_code {
  BLOBSTORE_OK = 0,
  BLOBSTORE_INVALID_FILE = 1,
  BLOBSTORE_INTEGRITY = 2,
  BLOBSTORE_FILE_ACCESS = 3, /* also: there is not enough memory */
  BLOBSTORE_KEY_NOT_FOUND = 4,
  BLOBSTORE_KEY_CONFLICT = 5,
  BLOBSTORE_LAYOUT = 6,
  BLOBSTORE_UNSUPPORTED = 8,
  BLOBSTORE_PROGRAM = 9 /* a delegate cannot take the weights; nothing was changed */
};

/* The blobs of data files in memory. */
typedef struct blobstore_weights blobstore_weights;

/* Open data files, and offer their weights to every method that ExecuTorch loads from now on, until they are closed.
 *
 * A delegate takes them if they are what ExecuTorch has under its keys: as the file has them, or as they are now. It
 * also takes keys that ExecuTorch was not given. Delegates that do not take them have ExecuTorch's, which never change.
 *
 * weights: what the caller must give to blobstore_close; NULL after an error. */
int blobstore_open(const char* const* paths, size_t count, blobstore_weights** weights);
/* As blobstore_open, for a working copy: commits of one process reach all that have it open, each at its next call. */
int blobstore_open_working_copy(const char* path, blobstore_weights** weights);
/* Write a working copy of data files. */
int blobstore_make_working_copy(const char* const* paths, size_t count, const char* target);
/* End the offer and free the object. Delegates keep the weights that they have. weights: may be NULL. */
void blobstore_close(blobstore_weights* weights);

/* Change all weights that a data file has, in one commit; or after an error, nothing. */
int blobstore_update(blobstore_weights* weights, const char* delta);
/* Go back to what the data files have, in one commit. A working copy cannot; update it with the file that it was made
 * of. */
int blobstore_revert(blobstore_weights* weights);
/* The number of commits, also of those by other processes. */
uint64_t blobstore_generation(const blobstore_weights* weights);
/* How many loaded delegates follow these weights. 0 means that an update reaches nobody. */
size_t blobstore_followers(const blobstore_weights* weights);

/* Why the last call on this thread that failed did so. The library owns the text, until the thread's next failure. */
const char* blobstore_error(void);
/* Why a delegate could not be loaded or run on this thread: ExecuTorch has only a number. Each reason is given once;
 * then it is "". The library owns the text, until the thread's next call of this function. */
const char* blobstore_delegate_error(void);

#ifdef __cplusplus
}
#endif
