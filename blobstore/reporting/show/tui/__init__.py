"""The report on a terminal, to walk through as in ncdu: `blobstore report --tui`. Needs the extra `tui`."""
