"""Makes prompts of an episode's history, and reads actions in the model's turns."""
