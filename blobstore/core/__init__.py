"""What reads, writes, compares and deduplicates files. It knows none of the wings that stand around it."""
