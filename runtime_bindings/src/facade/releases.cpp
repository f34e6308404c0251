#include "facade/attempt.h"

#define BLOBSTORE_RELEASES BLOBSTORE_ATTEMPT
#include <blobstore/nothrow.h>
