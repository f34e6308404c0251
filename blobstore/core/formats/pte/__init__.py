"""Programs (`.pte`): which weights they hold, and the same program without them."""
