"""Objects in a folder or a bucket, and why a store refused."""
