"""A command that plays a Harbor task: three turns of the model, each noted in a file; then it tries to pay itself."""

import json
import os
import urllib.request

messages = [{"role": "user", "content": "Write a note."}]
for _ in range(3):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 8}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=300) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    with open("notes.txt", "a", encoding="utf-8") as notes:
        notes.write(f"{text}\n")
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
with open("/logs/verifier/reward.txt", "w", encoding="utf-8") as reward:
    reward.write("100")
