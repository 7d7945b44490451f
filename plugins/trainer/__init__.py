"""The overrides of verl's three trainers, and the parts that they hand over to."""
