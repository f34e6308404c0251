"""Files on disk: their format by the first bytes, outputs that appear complete, and recovery after a killed process."""
