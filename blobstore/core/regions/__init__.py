"""What the bytes of a file are: regions, one behind the other, from the first byte to the last."""
