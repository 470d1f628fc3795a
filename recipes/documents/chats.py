"""Writes chats.jsonl: questions of sums, and answers that spell them out. `python
recipes/documents/chats.py`.
"""

import json
import random
from pathlib import Path

ASKED = (
    "What is {a} plus {b}?",
    "{a} + {b} = ?",
    "Please add {a} and {b}.",
    "How much are {a} and {b} together?",
)


def main() -> None:
    draw = random.Random(0)
    pairs = [(a, b) for a in range(20) for b in range(20)]
    draw.shuffle(pairs)
    lines = []
    for a, b in pairs:
        answer = f"{a} plus {b} is {a + b}."
        messages = [
            {"role": "user", "content": draw.choice(ASKED).format(a=a, b=b)},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    Path(__file__).with_name("chats.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
