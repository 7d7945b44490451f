"""From what happened to what the model reads, and from what it wrote to an action."""
