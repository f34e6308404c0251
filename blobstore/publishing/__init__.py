"""Publishing releases into a folder, and pushing them to a registry."""
