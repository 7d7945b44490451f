"""What runs left behind, to look at: numbers with their uncertainty, and runs beside each other. Needs no verl."""
