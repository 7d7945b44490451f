import sys

sys.path.append("/app")
from wrap import wrap

assert wrap("", 5) == []
assert wrap("one", 5) == ["one"]
assert wrap("a bb ccc dddd", 4) == ["a bb", "ccc", "dddd"]
assert wrap("a bb ccc dddd", 6) == ["a bb", "ccc", "dddd"]
assert wrap("extraordinary it is", 5) == ["extraordinary", "it is"]
