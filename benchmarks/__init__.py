"""Measurements against the incumbents: `make bench`. They are not part of the tests, because machines are shared and noisy."""
