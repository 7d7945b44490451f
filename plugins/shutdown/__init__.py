"""How a run ends before its last step: signals to the driver, dead actors, and what the two sides say to each other."""
