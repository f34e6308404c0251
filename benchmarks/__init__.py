"""Measurements against the incumbents: `make bench`. Never part of the tests, as machines are shared and noisy."""
