"""What a release is: its index, the forms of its contents, and references to it."""
