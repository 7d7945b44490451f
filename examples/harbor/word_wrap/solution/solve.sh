#!/bin/bash
cat > /app/wrap.py <<'END'
def wrap(text, width):
    """Lines of at most ``width`` characters."""
    lines, line = [], ""
    for word in text.split():
        if not line:
            line = word
        elif len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word
    return lines + [line] if line else lines
END
