"""The folder of a device: what it lacks, how it is fetched, and the switch to a release."""
