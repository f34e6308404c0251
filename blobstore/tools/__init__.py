"""What the command line does with whole files: compare, convert, inspect."""
