#!/bin/bash
cat > /app/middle.py <<'END'
def median(values):
    """The median of a list of numbers."""
    if not values:
        raise ValueError("an empty list has no median")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
END
