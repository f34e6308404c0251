"""`make kills`: processes on one pool that are killed at random moments, and what they leave."""
