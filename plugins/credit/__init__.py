"""From verl's rows to a table of steps, and from credit back to tokens."""
