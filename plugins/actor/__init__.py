"""Our losses inside verl's actor update."""
