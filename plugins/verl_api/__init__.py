"""The private parts of verl that we rely on, and the record of what we registered with it."""
