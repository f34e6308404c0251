"""Files on disk: which format a file has by its first bytes, outputs that appear whole, and what an interrupted run left."""
