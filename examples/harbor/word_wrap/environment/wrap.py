def wrap(text, width):
    """Lines of at most ``width`` characters."""
    lines, line = [], ""
    for word in text.split():
        if len(line) + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word
    return lines
