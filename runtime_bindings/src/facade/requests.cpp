#include "facade/attempt.h"

#define BLOBSTORE_RUNNERS BLOBSTORE_ATTEMPT
#include <blobstore/nothrow.h>
