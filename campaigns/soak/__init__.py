"""`make soak`: threads and processes that run, commit, revert, fork, load and save, with every output checked."""
