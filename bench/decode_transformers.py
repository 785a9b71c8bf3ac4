"""The side of transformers in decode.py: requests on stdin, answers on stdout, as JSON lines.

    python bench/decode_transformers.py CHECKPOINT THREADS

A request is {"prompt": ids, "tokens": n}; the answer {"seconds": s, "ids": new ids}.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    torch.set_num_threads(int(sys.argv[2]))
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompt = torch.tensor([request["prompt"]])
        count = request["tokens"]
        with torch.inference_mode():
            start = time.perf_counter()
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            seconds = time.perf_counter() - start
        new = ids[0, prompt.shape[1] :].tolist()
        print(json.dumps({"seconds": seconds, "ids": new}), file=answers, flush=True)


if __name__ == "__main__":
    main()
