"""Operations on whole files, for the command line: compare, convert, inspect."""
