"""What records programs in the sandbox of :mod:`script` in place of running them; any Python from 3.7 runs it."""

import json
import os
import sys

FOLDER = "/dev/turnkey"
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def record(words):  # type: ignore[no-untyped-def]
    """Append a program with its folder and environment to the calls of the script."""
    line = json.dumps({"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}) + "\n"
    with open(FOLDER + "/calls", "ab", buffering=0) as file:  # one write: programs of a pipe do so at the same time
        file.write(line.encode())


def runs_code(words):  # type: ignore[no-untyped-def]
    """Whether Python with these ``words`` reads its program from ``-c`` or stdin: a script computes values with it."""
    rest = iter(words[1:])
    for word in rest:
        if word in WITH_VALUE:
            next(rest, None)
        elif word == "-" or word.startswith("-c") or word in ("-V", "--version", "-h", "--help"):
            return True
        elif word.startswith("-m") or not word.startswith("-"):
            return False
    return True


def gpus(number, name, memory, words):  # type: ignore[no-untyped-def]
    """The lines of ``nvidia-smi`` with these ``words`` on a node with such GPUs of ``memory`` MiB; None: unknown."""
    rest, options = iter(words), {}
    for word in rest:
        key, _, value = word.partition("=")
        options[key] = next(rest, "") if key == "-i" else value
    chosen = options.pop("-i", "") or options.pop("--id", "")
    cards = [{"index": index, "uuid": f"GPU-{index}", "name": name, "count": number} for index in range(number)]
    if chosen:
        cards = [card for card in cards if {str(card["index"]), card["uuid"]} & {*chosen.split(",")}]
    if cards and [*options] in (["-L"], ["--list-gpus"]):
        return [f"GPU {card['index']}: {name} (UUID: {card['uuid']})" for card in cards]
    if not cards or {*options} != {"--query-gpu", "--format"}:
        return None
    fields, style = ([part.strip() for part in options[key].split(",")] for key in ("--query-gpu", "--format"))
    fields = [field[4:] if field in ("gpu_name", "gpu_uuid") else field for field in fields]
    total = "memory.total"
    if "csv" not in style or not {*fields} <= {*cards[0], total}:
        return None
    for card in cards:
        card[total] = memory if "nounits" in style else f"{memory} MiB"
    rows = [] if "noheader" in style else [[field + " [MiB]" * (field == total) for field in fields]]
    return [", ".join(row) for row in rows + [[str(card[field]) for field in fields] for card in cards]]


def start():  # type: ignore[no-untyped-def]
    """As ``sitecustomize`` of any Python of the sandbox: let it compute, or record it and end."""
    if __name__ == "__main__":  # in the place of another program
        name, *words = sys.argv[1:]
        if name == "python":  # words: the real one, and its arguments
            if runs_code(words):
                os.execv(words[0], words)
            record([os.path.basename(words[0]), *words[1:]])
            return
        if name == "ray" and words[:2] == ["job", "submit"] and "--" in words:
            command = words[words.index("--") + 1 :]
            os.execvp(command[0], command)
        if name == "gpus":  # words: number, name and memory of the GPUs, then nvidia-smi's arguments
            lines = gpus(int(words[0]), words[1], int(words[2]), words[3:])
            if lines is not None:
                print("\n".join(lines))
                return
            name, words = "nvidia-smi", words[3:]
        record(words if name == "skipped" else [name, *words])
        if name == "tee":  # passes on what it reads, without the file
            os.execvp("cat", ["cat"])
        return
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    if not runs_code(words):
        record([os.path.basename(words[0]), *words[1:]])
        os._exit(0)
