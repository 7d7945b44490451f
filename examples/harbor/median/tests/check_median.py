import sys

sys.path.append("/app")
from middle import median

assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
values = [3, 1, 2]
median(values)
assert values == [3, 1, 2]
try:
    median([])
except ValueError:
    pass
else:
    raise AssertionError("an empty list must raise ValueError")
