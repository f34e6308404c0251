"""Where releases are: servers, registries, image layouts and folders, and who signed what they give."""
