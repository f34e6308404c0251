"""Made by `make schema`; do not edit."""
