def median(values):
    """The median of a list of numbers."""
    values.sort()
    return values[len(values) // 2]
