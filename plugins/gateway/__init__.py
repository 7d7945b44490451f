"""An endpoint for agents written for a model API: it records every call of an episode as a turn."""
