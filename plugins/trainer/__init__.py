"""The mixin over verl's three trainers and what it decides: batches, mini-batches, retries, validation."""
