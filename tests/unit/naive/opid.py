def opid(rows, base, weight=0.001):
    return [[advantage + weight * gap for gap in row["gaps"]] for row, advantage in zip(rows, base, strict=True)]
