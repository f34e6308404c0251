#include "facade/attempt.h"

#define BLOBSTORE_RUNTIME BLOBSTORE_ATTEMPT
#include <blobstore/nothrow.h>
